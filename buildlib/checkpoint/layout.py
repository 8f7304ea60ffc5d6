"""Files of a model folder, before and after export: their names, and reading its JSON."""

import json
from pathlib import Path
from typing import Any, Final

from buildlib.errors import ModelFileError
from buildlib.files import check_file

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
GENERATION_FILE: Final = "generation_config.json"
MODEL_FILE: Final = "model.onnx"
ENCODINGS_FILE: Final = "model.encodings"
CALIBRATION_TEXT: Final = Path("text") / "calibration.txt"
MAX_CONFIG_BYTES: Final = 1 << 20
"""Size of the largest configuration that is read."""


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> Any:  # noqa: ANN401
    """Read a JSON file of a model folder; its content is not trusted."""
    try:
        check_file(path)
        if path.stat().st_size > max_bytes:
            raise ModelFileError(path, f"larger than {max_bytes:,} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(path, error.strerror or "cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"not valid JSON ({error})") from error
