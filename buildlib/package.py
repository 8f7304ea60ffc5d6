"""The last step of a build: configurations, manifest and binaries as one container."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, TOKENIZER_FILE
from buildlib.container.draft import ContainerDraft, write_container
from buildlib.container.genie_config import Context, GenieConfig, basic_dialog
from buildlib.container.genie_engine import RopeScaling
from buildlib.container.htp_config import htp_config
from buildlib.container.manifest import GraphsRecord, ModelRecord
from buildlib.encodings.model import Encodings
from buildlib.encodings.summary import in_words
from buildlib.plan import BuildPlan
from buildlib.targets import Target


def package(
    folder: Path,
    *,
    plan: BuildPlan,
    model_name: str,
    export: Path,
    inputs: Mapping[str, str],
    binaries: Sequence[Path],
    toolchain_versions: Mapping[str, str],
) -> None:
    """Write the container of a build to `folder`; Genie judges its configuration before it appears.

    Args:
        export: folder with `config.json` and `tokenizer.json`.
        inputs: SHA-256 of what the build read, by file name.
        binaries: context binaries in the order of data flow.
        toolchain_versions: name and versions of everything that compiled.

    Raises:
        CheckpointError: `config.json` is not that of a model that can be packaged.
        GenieConfigError: Genie refuses the configuration.
        ContainerError: the container cannot be written.
    """
    config = load_config(export / CONFIG_FILE)
    target = plan.target
    options = {**plan.as_options(), "split_model.num_splits": len(binaries)}
    draft = ContainerDraft(
        target=target,
        model=ModelRecord(
            name=model_name,
            architecture=config.model_type,
            inputs=inputs,
            quantization=in_words(Encodings.load(export / ENCODINGS_FILE)),
        ),
        graphs=GraphsRecord(
            auto_regression_numbers=plan.ars,
            context_length=plan.context_lengths[-1],
            context_lengths=plan.context_lengths,
            splits=len(binaries),
        ),
        genie_config=genie_config(
            config, plan.context_lengths[-1], [path.name for path in binaries], target
        ),
        htp_config=htp_config(target),
        tokenizer=export / TOKENIZER_FILE,
        binaries={path.name: path for path in binaries},
        toolchain=toolchain_versions,
        options=options,
    )
    write_container(draft, folder)


def genie_config(
    config: DecoderConfig, context_length: int, ctx_bins: Sequence[str], target: Target
) -> GenieConfig:
    """The dialog of a decoder: its sizes, its special tokens, its rotary positions."""
    eos = config.eos_token_ids
    scaling = config.rope_scaling
    return basic_dialog(
        context=Context(
            size=context_length,
            n_vocab=config.vocab_size,
            bos_token=config.bos_token_id,
            eos_token=eos[0] if len(eos) == 1 else eos,
        ),
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim,
        rope_theta=config.rope_theta,
        rope_scaling=RopeScaling.model_validate(scaling.model_dump()) if scaling else None,
        ctx_bins=ctx_bins,
        emulator=target.emulator,
    )
