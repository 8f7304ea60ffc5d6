"""Names of the files in a model folder, before and after export."""

from typing import Final

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
MODEL_FILE: Final = "model.onnx"
ENCODINGS_FILE: Final = "model.encodings"
