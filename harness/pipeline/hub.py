"""The model of a pipeline: a folder, or a download from the Hugging Face hub."""

import re
from pathlib import Path

from buildlib.paths import user_path
from harness.errors import PipelineError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "tokenizer.model", "text/*.txt")


def find_model(model: str, base: Path, revision: str | None = None) -> tuple[Path, str]:
    """Return the folder of a model, or its ONNX file, and its name; the hub's are downloaded once.

    Args:
        model: a path, or an id such as `meta-llama/Llama-3.2-1B`.
        base: of relative paths.
        revision: branch, tag or commit of a model of the hub.
    """
    path = base / user_path(model)
    if path.exists():
        target = path.resolve()
        return path.absolute(), target.name if target.is_dir() else target.parent.name
    if not _HUB_ID.fullmatch(model):
        raise PipelineError(
            f"{model}: no such folder, and that is no id of the Hugging Face hub either, "
            "such as org/name"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        reason = "a download from the Hugging Face hub needs `pip install qnnfarm[hub]`"
        raise PipelineError(f"{model}: no such folder, and {reason}") from None
    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=list(_FILES))
    except Exception as error:  # the library raises its own kinds, and those of its transport
        reason = f"the Hugging Face hub did not give it: {error}"
        raise PipelineError(f"{model}: no such folder, and {reason}") from error
    return Path(folder), model.partition("/")[2]


def folder_of(model: Path) -> Path:
    """Return the folder of a model, which may be named by its ONNX file."""
    return model if model.is_dir() else model.parent
