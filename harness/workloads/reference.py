"""The model in float that this host computes beside a device: by our own graph, or transformers."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from buildlib.graph.shape import GraphShape
from harness.errors import WrongUseError
from harness.results.records import ContainerInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from buildlib.checkpoint.config import DecoderConfig
    from buildlib.numerics.evaluation import Sample
    from buildlib.numerics.host_loop import TokenModel
    from buildlib.numerics.transformers import ReferenceEngine
    from harness.runtimes.base import Window

_AR = 64
"""Tokens a call of the model in float, where the device's has no graphs."""


def float_config(checkpoint: str | os.PathLike[str], folder: Path | None = None) -> "DecoderConfig":
    """Read the configuration of what `open_float` opens, and what its tokenizer adds to texts."""
    from buildlib.builder.model_place import find_model
    from buildlib.checkpoint.tokenizer import load_text_config

    return load_text_config(find_model(checkpoint, folder).folder)


@contextmanager
def open_float(
    checkpoint: str | os.PathLike[str],
    info: ContainerInfo,
    engine: "ReferenceEngine",
    folder: Path | None = None,
) -> "Iterator[TokenModel]":
    """Open a model in float for a block, for texts as long as a container's context.

    Args:
        checkpoint: as `find_model` takes it: a folder of a checkpoint or of an export, a GGUF, or
            an id of the hub.
        folder: that a relative path starts from.
    """
    # Workloads are read and checked without ONNX.
    from buildlib.builder.model_place import find_model
    from buildlib.builder.sources import find_source
    from buildlib.builder.verification import float_loop
    from buildlib.numerics.transformers import TransformersModel

    place = find_model(checkpoint, folder)
    if engine == "transformers":
        with TransformersModel(place.folder) as reference:
            yield reference
        return
    shape = GraphShape(max(info.ars), info.cl) if info.ars else GraphShape(_AR, _AR + info.cl)
    with float_loop(find_source(place.path, None, calibrates=False), shape) as loop:
        yield loop


def window_samples(
    windows: "Sequence[Window]", begin: "Sequence[int]", model: str
) -> "list[Sample]":
    """Return the windows of a model as samples for its reference.

    Args:
        begin: what the tokenizer of the reference puts before texts.
        model: its name, for errors.
    """
    from buildlib.numerics.evaluation import Sample

    if not begin and not all(window.context for window in windows):
        raise WrongUseError(
            f"{model} puts bos before texts, and the tokenizer of its reference nothing: build the "
            "container again"
        )
    return [Sample(tuple(begin), window.context, window.scored) for window in windows]


def engine_versions(engine: "ReferenceEngine") -> dict[str, str]:
    """Return versions of the libraries of an engine, by name; none for our own code."""
    if engine == "onnx":
        return {}
    from buildlib.numerics.transformers import installed_versions

    return installed_versions()
