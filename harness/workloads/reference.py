"""The model in float that this host computes beside a device: by our own graph, or transformers."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from buildlib.graph.shape import GraphShape
from harness.results.records import ContainerInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildlib.checkpoint.config import DecoderConfig
    from buildlib.numerics.host_loop import TokenModel
    from buildlib.numerics.transformers import ReferenceEngine

_AR = 64
"""Tokens a call of the model in float, where the device's has no graphs."""


@contextmanager
def open_float(
    checkpoint: str | os.PathLike[str],
    info: ContainerInfo,
    engine: "ReferenceEngine",
    folder: Path | None = None,
) -> "Iterator[tuple[TokenModel, DecoderConfig]]":
    """Open a checkpoint in float for a block, for texts as long as a model's context.

    Args:
        checkpoint: as `find_model` takes it: a folder, a GGUF, or an id of the hub.
        folder: that a relative path starts from.
    """
    # Workloads are read and checked without ONNX.
    from buildlib.builder.model_place import find_model
    from buildlib.checkpoint.checkpoint import Checkpoint
    from buildlib.checkpoint.tokenizer import load_text_config
    from buildlib.graph.decoder import export_onnx
    from buildlib.numerics.host_loop import open_onnx
    from buildlib.numerics.transformers import TransformersModel

    place = find_model(checkpoint, folder)
    config = load_text_config(place.folder)
    if engine == "transformers":
        with TransformersModel(place.folder) as reference:
            yield reference, config
        return
    shape = GraphShape(max(info.ars), info.cl) if info.ars else GraphShape(_AR, _AR + info.cl)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as scratch:
        path = export_onnx(Checkpoint.load(place.folder), shape, Path(scratch))
        with open_onnx(path, config) as loop:
            yield loop, config


def engine_versions(engine: "ReferenceEngine") -> dict[str, str]:
    """Return versions of the libraries of an engine, by name; none for our own code."""
    if engine == "onnx":
        return {}
    from buildlib.numerics.transformers import installed_versions

    return installed_versions()
