"""Names of the files in a model folder: of a checkpoint, and of what it is exported to."""

from typing import Final

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
MODEL_FILE: Final = "model.onnx"
ENCODINGS_FILE: Final = "model.encodings"
