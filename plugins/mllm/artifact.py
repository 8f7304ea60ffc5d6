"""A folder of mllm's AOT flow: a context binary, `config_X.json` and a tokenizer.

Source: https://github.com/UbiquitousLearning/mllm (MIT), `examples/qwen3_qnn_aot`.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from buildlib.checkpoint.config import read_object
from buildlib.checkpoint.layout import TOKENIZER_FILE
from buildlib.errors import InputFileError
from buildlib.foreign.artifact import ForeignArtifact

_CONFIG, _PLAIN_CONFIG, _BINARY = "config_*.json", "config.json", "*.bin"


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model_type: Annotated[str, Field(max_length=100)] = "unknown"
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] = ()


def is_artifact(path: Path) -> bool:
    """Return whether it is a folder with a binary and a configuration, or such a binary."""
    folder = path if path.is_dir() else path.parent
    has_config = any(folder.glob(_CONFIG)) or (folder / _PLAIN_CONFIG).is_file()
    return has_config and (path.match(_BINARY) or any(path.glob(_BINARY)))


def read_artifact(path: Path, scratch: Path, tokenizer: Path | None) -> ForeignArtifact:
    """Read a folder, or the one around a binary."""
    del scratch, tokenizer
    folder = path if path.is_dir() else path.parent
    binary = _only(folder, _BINARY) if path.is_dir() else path
    file = _only(folder, _CONFIG if any(folder.glob(_CONFIG)) else _PLAIN_CONFIG)
    config = read_object(file, _Config)
    own, ends = folder / TOKENIZER_FILE, config.eos_token_id
    return ForeignArtifact(
        path,
        name=path.resolve().stem,
        contract="mllm",
        binaries=(binary,),
        files={one.name: one for one in (binary, file)},
        tokenizer=own if own.is_file() else None,
        bos=config.bos_token_id,
        eos=(ends,) if isinstance(ends, int) else ends,
        architecture=config.model_type,
        toolchain={"toolchain": "mllm"},
    )


def _only(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:4]) or "none"
        raise InputFileError(str(folder), f"one file {pattern} is needed: it has {names}")
    return files[0]
