"""The last step of a build: configurations, manifest and binaries as one container."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from buildlib.checkpoint.config import LlamaConfig, load_config
from buildlib.checkpoint.layout import CONFIG_FILE, TOKENIZER_FILE
from buildlib.container.container import ContainerDraft, write_container
from buildlib.container.genie_config import Context, GenieConfig, RopeScaling, basic_dialog
from buildlib.container.htp_config import htp_config
from buildlib.container.manifest import GraphsRecord, ModelRecord, Scalar
from buildlib.graph.shape import GraphShape
from buildlib.targets import Target
from buildlib.toolchains.base import CompileConfig


def package(
    folder: Path,
    *,
    model_name: str,
    export: Path,
    inputs: Mapping[str, str],
    shapes: Sequence[GraphShape],
    binaries: Sequence[Path],
    target: Target,
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
    compiled = CompileConfig.for_target(target)
    options: dict[str, Scalar | tuple[Scalar, ...]] = {
        "arn_cl_options.auto_regression_number": tuple(shape.ar for shape in shapes),
        "arn_cl_options.context_length": shapes[0].cl,
        "split_model.num_splits": len(binaries),
        "graphs.vtcm_size_in_mb": compiled.vtcm_mb,
        "graphs.optimization_type": compiled.optimization_level,
        "context.weight_sharing_enabled": compiled.weight_sharing,
    }
    draft = ContainerDraft(
        target=target,
        model=ModelRecord(
            name=model_name,
            architecture=config.model_type,
            inputs=inputs,
            quantization={
                "activations": "uint16 per tensor",
                "weights": "int8 per channel",
                "kv_cache": "uint8 symmetric",
            },
        ),
        graphs=GraphsRecord(
            auto_regression_numbers=tuple(shape.ar for shape in shapes),
            context_length=shapes[0].cl,
            splits=len(binaries),
        ),
        genie_config=genie_config(config, shapes[0].cl, [path.name for path in binaries], target),
        htp_config=htp_config(target),
        tokenizer=export / TOKENIZER_FILE,
        binaries={path.name: path for path in binaries},
        toolchain=toolchain_versions,
        options=options,
    )
    write_container(draft, folder)


def genie_config(
    config: LlamaConfig, context_length: int, ctx_bins: Sequence[str], target: Target
) -> GenieConfig:
    """The dialog of a Llama: its sizes, its special tokens, its rotary positions."""
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
        rope_theta=config.rope_theta,
        rope_scaling=RopeScaling.model_validate(scaling.model_dump()) if scaling else None,
        ctx_bins=ctx_bins,
        emulator=target.emulator,
    )
