"""`builder.verify()`: the stages of a finished build against each other."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.checkpoint.layout import CONFIG_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.checkpoint.tokenizer import load_tokenizer
from buildlib.embedding.config import TABLE_FILE, EmbeddingConfig
from buildlib.graph import interface
from buildlib.graph.files import load_model
from buildlib.graph.interface import require_shape
from buildlib.graph.values import static_shape
from buildlib.importing.source_runner import SourcePart
from buildlib.numerics.comparison import VerificationReport
from buildlib.numerics.feeds import Embed
from buildlib.numerics.stage_models import StageModels, Version, compile_for_emulator, onnx_parts
from buildlib.numerics.transformers import ReferenceEngine, TransformersPart
from buildlib.numerics.verifier import (
    FINITE,
    SAME_FLOAT,
    SAME_HALF,
    SAME_MODEL,
    OnComparison,
    VerifyOptions,
    verify_outputs,
)
from buildlib.pipeline.build import Build, BuildOutputs, Sources
from buildlib.pipeline.runner import OnStage
from buildlib.pipeline.sources import OnnxSource
from buildlib.pipeline.stages.extract_embedding import EMBEDDING_FILE


def verify_build(
    build: Build,
    options: VerifyOptions | None = None,
    *,
    emulator: bool = False,
    reference_with: ReferenceEngine = "onnx",
    on_stage: OnStage | None = None,
    on_comparison: OnComparison | None = None,
) -> VerificationReport:
    """Run a build, and compare what each stage made with what it was made from.

    The sample is the calibration text, if the source has one.

    Args:
        build: whose stages are compared.
        options: size of the sample.
        emulator: compare compiled graphs too; for a phone they are compiled a second time,
            without shared weights, as the emulator needs them.
        reference_with: `transformers` compares the first stage with what transformers computes from
            the model's folder; else a checkpoint has nothing before its first stage.
        on_stage: called after each stage of the build.
        on_comparison: called after each comparison.

    Raises:
        BuildError: any of its kinds; that a comparison fails is in the report.
    """
    outputs, sources, target = build.outputs(on_stage), build.sources, build.plan.target
    config = load_config(outputs.export / CONFIG_FILE)
    wanted = options or VerifyOptions(soc_model=target.soc.soc_model)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-verify-") as scratch:
        binaries: tuple[Path, ...] | None = None
        if emulator:
            binaries = (
                outputs.binaries
                if target.emulator
                else compile_for_emulator(outputs.dlcs, target, build.toolchain, Path(scratch))
            )
        models = StageModels(
            config=config,
            imported={
                shape: list(versions.values())[-1].folder / MODEL_FILE
                for shape, versions in outputs.versions.items()
            },
            earlier=_earlier(outputs, sources, config, wanted.n_threads, reference_with),
            arcl=outputs.float_models,
            split=outputs.multi_head_parts,
            sha=None if outputs.float_parts == outputs.multi_head_parts else outputs.float_parts,
            qdq=outputs.qdq_parts,
            binaries=binaries,
            embed=_embed(outputs),
            constants=_no_adapters(outputs),
        )
        tokens = _sample(sources.main.calibration_text, outputs.export, config, wanted)
        return verify_outputs(
            models,
            tokens,
            emulator=build.toolchain if emulator else None,
            options=wanted,
            on_comparison=on_comparison,
        )


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
    """Return what the model of each shape was made of.

    First what transformers makes of its folder, if that is asked for, then an export as it came,
    then each version.
    """
    found: dict[Path, list[Version]] = {}
    for shape, versions in outputs.versions.items():
        source, stages = sources[shape], list(versions)
        paths = [entry.folder / MODEL_FILE for entry in versions.values()]
        own, made = require_shape(paths[-1]), found.setdefault(paths[-1], [])
        if made:
            continue
        exact, bound = SAME_FLOAT, SAME_MODEL
        export = None
        if isinstance(source, OnnxSource) and source.canonical is None:
            export = SourcePart(source.model, config, own)
            if export.is_reduced_precision():
                exact = bound = SAME_HALF
        if reference_with == "transformers":
            made.append(Version("reference", bound, TransformersPart(source.folder, config, own)))
        if export is not None:
            made.append(Version(stages[0], exact, export))
        for stage, path in zip(stages[1:], paths, strict=False):
            [part] = onnx_parts({own.ar: [path]}, n_threads)
            made.append(Version(stage, _MAY_CHANGE.get(stage, SAME_FLOAT), part))
    return found


def _sample(
    text: str | None, export: Path, config: DecoderConfig, options: VerifyOptions
) -> list[int] | None:
    if text is None:
        return None
    tokenizer = load_tokenizer(export / TOKENIZER_FILE)
    ids = tokenizer.encode(text[: 64 * options.max_positions], add_special_tokens=False).ids
    return [config.bos_token_id, *ids][: options.max_positions]
