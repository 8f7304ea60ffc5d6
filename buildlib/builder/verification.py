"""Verification of a build, stage by stage, and the model in float that one starts from."""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from buildlib.builder.build import Build, BuildOutputs, Sources
from buildlib.builder.canonical import find_export_reader
from buildlib.builder.runner import OnStage
from buildlib.builder.sources import CheckpointSource, ModelSource, OnnxSource, positions_of
from buildlib.builder.stages.author import AuthorModel
from buildlib.builder.stages.extract_embedding import EMBEDDING_FILE
from buildlib.builder.stages.import_onnx import ImportOnnx
from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.checkpoint.layout import CONFIG_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.checkpoint.tokenizer import load_text_config, load_tokenizer
from buildlib.embedding.config import TABLE_FILE, EmbeddingConfig
from buildlib.errors import InvalidOptionError
from buildlib.graph import interface
from buildlib.graph.files import load_model
from buildlib.graph.interface import require_shape
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import static_shape
from buildlib.numerics.comparison import (
    FINITE,
    SAME_FLOAT,
    SAME_HALF,
    SAME_MODEL,
    SideComparison,
    VerificationReport,
)
from buildlib.numerics.evaluation import (
    ModelSide,
    compare_sides,
    open_side,
    text_samples,
)
from buildlib.numerics.feeds import Embed
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner, PartRunner
from buildlib.numerics.transformers import (
    ReferenceEngine,
    TransformersModel,
    TransformersPart,
    installed_versions,
    require_family,
    require_installed,
)
from buildlib.numerics.verifier import (
    OnComparison,
    Parts,
    StageModels,
    VerifyOptions,
    Version,
    sample_tokens,
    verify_outputs,
)
from buildlib.passes.arcl import convert_arcl
from buildlib.targets import Target
from buildlib.toolchains.base import OpPackageLibrary, Toolchain
from buildlib.toolchains.compile_config import CompileConfig


def verify_build(
    build: Build,
    options: VerifyOptions | None = None,
    *,
    emulator: bool = False,
    reference_with: ReferenceEngine = "onnx",
    on_stage: OnStage | None = None,
    on_comparison: OnComparison | None = None,
) -> VerificationReport:
    """Run a build, and compare the output of each stage with its input.

    The sample is the calibration text, if the source has one.

    Args:
        options: size of the sample.
        emulator: compare compiled graphs too; for a phone they are compiled a second time,
            without shared weights, as the emulator needs them.
        reference_with: `transformers` compares the first stage with transformers' own model of the
            folder; else a checkpoint has nothing before its first stage.
        on_stage: called after each stage of the build.
        on_comparison: called after each comparison.
    """
    engines = get_args(ReferenceEngine)
    if reference_with not in engines:
        raise InvalidOptionError("reference_with", f"{reference_with!r} computes none", engines)
    if reference_with == "transformers":
        require_family(build.sources.main.folder)  # before a long build
    outputs, sources, target = build.outputs(on_stage), build.sources, build.plan.target
    config = load_config(outputs.export / CONFIG_FILE)
    options = options or VerifyOptions(soc_model=target.soc.soc_model)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-verify-") as scratch:
        binaries: tuple[Path, ...] | None = None
        packages = build.plan.operations.host
        if emulator:
            binaries = (
                outputs.binaries
                if target.emulator
                else _compile_for_emulator(
                    outputs.dlcs, target, build.toolchain, Path(scratch), packages
                )
            )
        models = StageModels(
            config=config,
            imported={
                shape: versions[-1].folder / MODEL_FILE
                for shape, versions in outputs.versions.items()
            },
            earlier=_earlier(outputs, sources, config, options.n_threads, reference_with),
            arcl=outputs.float_models,
            split=outputs.multi_head_parts,
            sha=None if outputs.float_parts == outputs.multi_head_parts else outputs.float_parts,
            qdq=outputs.qdq_parts,
            binaries=binaries,
            embed=_embed(outputs),
            constants=_no_adapters(outputs),
            op_packages=packages,
        )
        tokens = _sample(sources.main.calibration_text, outputs.export, config, options)
        return verify_outputs(
            models,
            tokens,
            emulator=build.toolchain if emulator else None,
            options=options,
            on_comparison=on_comparison,
        )


def _compile_for_emulator(
    dlcs: Parts,
    target: Target,
    toolchain: Toolchain,
    folder: Path,
    op_packages: Sequence[OpPackageLibrary],
) -> tuple[Path, ...]:
    """Compile a phone's DLCs for the emulator of its SoC: unshared, one binary a part."""
    config = CompileConfig.for_target(Target(target.soc, emulator=True))
    binaries = []
    for number, part in enumerate(zip(*dlcs.values(), strict=True), start=1):
        binary = folder / f"part_{number}.bin"
        toolchain.compile(part, binary, config, op_packages)
        binaries.append(binary)
    return tuple(binaries)


def _embed(outputs: BuildOutputs) -> Embed | None:
    folder = outputs.prepared.table
    if folder is None:
        return None
    text = (folder / EMBEDDING_FILE).read_text("utf-8")
    table = EmbeddingConfig.model_validate_json(text)
    return table.model_copy(update={"embed_path": folder / TABLE_FILE}).rows


def _no_adapters(outputs: BuildOutputs) -> dict[str, npt.NDArray[Any]]:
    """Return inputs of adapters, none of which is active."""
    model = load_model(outputs.export / MODEL_FILE)
    inputs = {str(value.name): static_shape(value) for value in model.graph.inputs}
    return {
        name: np.zeros(dims, np.float32)
        for name, dims in inputs.items()
        if interface.LORA in name and dims is not None
    }


_MAY_CHANGE = {"optimize": FINITE, "embedding": FINITE}
"""Bounds of the stages that change weights so that they quantize better, or round them."""


def _earlier(
    outputs: BuildOutputs,
    sources: Sources,
    config: DecoderConfig,
    n_threads: int,
    reference_with: ReferenceEngine,
) -> dict[Path, list[Version]]:
    """Return the origins of each shape's model: transformers' one, the export, each version."""
    by_model: dict[Path, list[Version]] = {}
    for shape, versions in outputs.versions.items():
        source, stages = sources[shape], [entry.operation for entry in versions]
        paths = [entry.folder / MODEL_FILE for entry in versions]
        own, chain = require_shape(paths[-1]), by_model.setdefault(paths[-1], [])
        if chain:
            continue
        exact, bound = SAME_FLOAT, SAME_MODEL
        exported = []
        if isinstance(source, OnnxSource) and source.canonical is None:
            export, reader = source.model, find_export_reader(source.model)
            if reader.is_coarse(load_model(export)):
                exact = bound = SAME_HALF
            runner: Callable[[], PartRunner] = partial(reader.open_export, export, config, own)
            exported = [Version(stages[0], exact, runner)]
        if reference_with == "transformers":
            reference = partial(TransformersPart, source.folder, config, own)
            chain.append(Version("reference", bound, reference))
        chain += exported
        for stage, path in zip(stages[1:], paths, strict=False):
            runner = partial(OnnxRunner, path, n_threads=n_threads, plain=True)
            chain.append(Version(stage, _MAY_CHANGE.get(stage, SAME_FLOAT), runner))
    return by_model


def _sample(
    text: str | None, export: Path, config: DecoderConfig, options: VerifyOptions
) -> list[int] | None:
    if text is None:
        return None
    tokenizer = load_tokenizer(export / TOKENIZER_FILE)
    ids = tokenizer.encode(text[: 64 * options.max_positions], add_special_tokens=False).ids
    return [*config.begin, *ids][: options.max_positions]


_AR = 32


def verify_model(
    source: ModelSource,
    windows: Sequence[Sequence[int]] | None = None,
    *,
    length: int = 96,
) -> Iterator[SideComparison]:
    """Compare a checkpoint, or an export with its checkpoint beside it, with transformers.

    Args:
        source: as a build reads it.
        windows: token ids without bos; by default a window of random ones.
        length: tokens of a window at most, bos included, or as many as the model has positions for.

    Raises:
        BuildError: torch or transformers is not installed, or cannot read it.
    """
    require_installed(source.folder)
    config = load_text_config(source.folder)
    length = int(min(length, positions_of(source) or math.inf))
    shape = GraphShape(_AR, max(2, -(-length // _AR)) * _AR)
    versions = ", ".join(f"{name} {text}" for name, text in installed_versions().items())
    folder = source.folder
    with float_loop(source, shape, decodes=True) as ours:
        room = min(length, ours.cl) - len(config.begin)
        plain = sample_tokens(config, length)[len(config.begin) :]
        cut = [window[:room] for window in windows or [plain]]
        yield from compare_sides(
            ModelSide("transformers", lambda: open_side(TransformersModel(folder), versions)),
            [
                ModelSide(
                    source.name,
                    lambda: open_side(nullcontext(ours), "CPU, float", decodes=True),
                    SAME_MODEL,
                    ("prefill", "decode"),
                )
            ],
            text_samples(cut, config.begin),
            config.vocab_size,
        )


@contextmanager
def float_loop(
    source: ModelSource, shape: GraphShape, *, decodes: bool = False
) -> Iterator[HostLoop]:
    """Make the model in float that a build would start from, and open it.

    Args:
        source: a checkpoint or an export; an export may have a shape of its own.
        decodes: with a graph of one token a call beside it; weights then stay in their files.
    """
    config = load_text_config(source.folder)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as scratch:
        folder = Path(scratch)
        match source:
            case OnnxSource():
                ImportOnnx(source, {}, shape).run(folder)
            case CheckpointSource():
                AuthorModel(source, {}, shape).run(folder)
        model = folder / MODEL_FILE
        shape = require_shape(model)
        files = {shape.ar: model}
        if decodes and shape.ar > 1:
            files[1] = convert_arcl(model, GraphShape(1, shape.cl), folder / "decode.onnx")
        runners = {ar: [OnnxRunner(path, plain=decodes)] for ar, path in files.items()}
        with HostLoop(runners, config) as loop:
            yield loop
