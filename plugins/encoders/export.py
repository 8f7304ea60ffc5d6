"""The ONNX of a text encoder, exported by torch and transformers where a folder has none."""

from pathlib import Path

from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.numerics.transformers import TransformersProcess
from plugins.encoders import interface

EXPORT_FAILURE = "has no ONNX, and cannot be exported"
"""What a checkpoint is without torch, or with an architecture that it cannot export."""
_EXPORTER = "plugins.encoders.export_worker"


def export_encoder(folder: Path, out: Path) -> Path:
    """Write a checkpoint in Hugging Face layout as ONNX, by torch and transformers.

    Raises:
        BuildError: they are not installed, or cannot load or export the model.
    """
    with TransformersProcess(_EXPORTER, folder, EXPORT_FAILURE) as child:
        child.request({"folder": str(folder.absolute()), "out": str(out.absolute())}, {})
    return out


def float_model(path: Path, scratch: Path) -> Path:
    """Return the ONNX of an encoder: a file, that of a folder, or an export in `scratch`.

    Raises:
        BuildError: the folder has none, and it cannot be exported.
    """
    model = path / MODEL_FILE if path.is_dir() else path
    if model.exists() or not interface.is_sentence_transformer(path):
        return model
    return export_encoder(path, scratch / MODEL_FILE)
