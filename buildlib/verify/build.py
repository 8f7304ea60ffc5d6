"""`builder.verify()`: the stages of a finished build against each other."""

import tempfile
from pathlib import Path

from buildlib.build import BuildOutputs, Sources
from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.checkpoint.layout import CONFIG_FILE, TOKENIZER_FILE
from buildlib.plan import own_shape
from buildlib.quantize.export import load_tokenizer
from buildlib.source import OnnxSource
from buildlib.targets import Target
from buildlib.toolchains.base import Toolchain
from buildlib.verify.models import StageModels, compile_for_emulator
from buildlib.verify.report import VerificationReport
from buildlib.verify.source import source_part
from buildlib.verify.trace import OpenPart
from buildlib.verify.verify import OnComparison, VerifyOptions, verify_outputs


def verify_build(
    outputs: BuildOutputs,
    sources: Sources,
    target: Target,
    emulator: Toolchain | None,
    options: VerifyOptions | None = None,
    on_comparison: OnComparison | None = None,
) -> VerificationReport:
    """Compare what each stage of a build made with what it was made from.

    The sample is the calibration text, if the source has one.

    Args:
        outputs: of the build.
        sources: that it was made of.
        target: of the build.
        emulator: runs compiled graphs; without it they are not compared.
        options: how much is run.
        on_comparison: told of each comparison as it is made.

    Raises:
        BuildError: a model cannot be run, or the emulator failed.
    """
    config = load_config(outputs.export / CONFIG_FILE)
    wanted = options or VerifyOptions(soc_model=target.soc.soc_model)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-verify-") as scratch:
        binaries: tuple[Path, ...] | None = None
        if emulator is not None:
            binaries = (
                outputs.binaries
                if target.emulator
                else compile_for_emulator(outputs.dlcs, target, emulator, Path(scratch))
            )
        models = StageModels(
            config=config,
            imported=outputs.exports,
            sources=_sources(outputs, sources, config),
            arcl=outputs.float_models,
            split=outputs.multi_head_parts,
            sha=None if outputs.float_parts == outputs.multi_head_parts else outputs.float_parts,
            qdq=outputs.qdq_parts,
            binaries=binaries,
        )
        tokens = _sample(sources.main.calibration_text, outputs.export, config, wanted)
        return verify_outputs(
            models, tokens, emulator=emulator, options=wanted, on_comparison=on_comparison
        )


def _sources(
    outputs: BuildOutputs, sources: Sources, config: DecoderConfig
) -> dict[Path, OpenPart]:
    """The exports as they came; a checkpoint has none."""
    found = {}
    for shape, imported in outputs.exports.items():
        source = sources[shape]
        if isinstance(source, OnnxSource):
            found[imported] = source_part(source.model, config, own_shape(imported))
    return found


def _sample(
    text: str | None, export: Path, config: DecoderConfig, options: VerifyOptions
) -> list[int] | None:
    if text is None:
        return None
    tokenizer = load_tokenizer(export / TOKENIZER_FILE)
    ids = tokenizer.encode(text[: 64 * options.max_positions], add_special_tokens=False).ids
    return [config.bos_token_id, *ids][: options.max_positions]
