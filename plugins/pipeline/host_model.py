"""The output of any stage as a model that runs on this host: float, quantized, or compiled."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.container.container import GenAIContainer
from buildlib.container.op_packages import registrations
from buildlib.embedding.config import EmbeddingConfig
from buildlib.encodings.files import load_encodings
from buildlib.graph.interface import require_shape
from buildlib.numerics.emulator import emulator_chains
from buildlib.numerics.host_loop import HostLoop, open_onnx
from buildlib.quantize.qdq import apply_encodings
from buildlib.targets import parse_target
from buildlib.toolchains.base import OpPackageLibrary
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from harness.errors import PipelineError
from harness.runtimes.tokenizer import ContextLimit
from plugins.pipeline.stage import ModelFolder


@dataclass(frozen=True)
class HostModel:
    """A model that runs on this host.

    Attributes:
        kind: `float`, `quantized` (as QDQ on the CPU), or `compiled` (on the HTP emulator).
        tokenizer: its `tokenizer.json`.
        limit: of its context, by which texts are cut into windows.
        config: says which tokens lead and end a text.
    """

    kind: str
    tokenizer: Path
    limit: ContextLimit
    loop: HostLoop
    config: DecoderConfig


@contextmanager
def open_host_model(outputs: Mapping[str, object], scratch: Path) -> Iterator[HostModel]:
    """Open the latest model for a block.

    Args:
        outputs: of the finished stages by name: a container, or else a model.
        scratch: folder for files that go away with the block.

    Raises:
        PipelineError: it has none, or one that only its device can run.
        BuildError: the model cannot run.
    """
    container, model = outputs.get("container"), outputs.get("model")
    if not isinstance(model, ModelFolder):
        raise PipelineError("no stage has made a model yet; construct() runs them")
    if reason := unable_here(outputs):
        raise PipelineError(reason)
    if isinstance(container, Path):
        with _compiled(GenAIContainer.load(container), model.path) as host_model:
            yield host_model
    else:
        with _onnx(model, scratch) as host_model:
            yield host_model


def unable_here(outputs: Mapping[str, object]) -> str:
    """Return why this host cannot run the latest model; empty if it can."""
    container = outputs.get("container")
    if not isinstance(container, Path):
        return ""
    target = parse_target(GenAIContainer.load(container).metadata.target.name)
    other = f"name a device of that kind, or build for {target}:emulator"
    return "" if target.emulator else f"the container is for {target}: {other}"


@contextmanager
def _onnx(model: ModelFolder, scratch: Path) -> Iterator[HostModel]:
    folder = model.path
    path, config = folder / MODEL_FILE, load_config(folder / CONFIG_FILE)
    shape = require_shape(path)
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".evaluate.") as temporary:
        kind = "quantized" if model.quantized else "float"
        if model.quantized:
            encodings = load_encodings(folder / ENCODINGS_FILE)
            path = apply_encodings(path, encodings, Path(temporary) / "quantized.onnx")
        with open_onnx(path, config) as loop:
            limit = ContextLimit(shape.cl, shape.ar)
            yield HostModel(kind, folder / TOKENIZER_FILE, limit, loop, config)


@contextmanager
def _compiled(container: GenAIContainer, model: Path) -> Iterator[HostModel]:
    target = parse_target(container.metadata.target.name)
    config = load_config(model / CONFIG_FILE)
    cl = container.metadata.graphs.context_length
    binaries = [container.path / name for name in container.genie_config.ctx_bins]
    chains = emulator_chains(
        binaries,
        OrtQnnToolchain(),
        soc_model=target.soc.soc_model,
        cl=cl,
        op_packages=[
            OpPackageLibrary(container.path / one.file, one.provider)
            for one in registrations(container.metadata.op_packages)
        ],
    )
    block = container.genie_config.dialog.embedding
    table = None if block is None else EmbeddingConfig.from_genie(block, container.path)
    with HostLoop(chains, config, embed=None if table is None else table.rows) as loop:
        tokenizer, limit = container.files[TOKENIZER_FILE], ContextLimit.of(container)
        yield HostModel("compiled", tokenizer, limit, loop, config)
