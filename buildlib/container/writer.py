"""Writer of containers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buildlib.cache.file_hashes import HashMemo
from buildlib.container.container import GenAIContainer, copy_file, place_folder, write_text
from buildlib.container.genie_validator import check_genie_config
from buildlib.container.htp_config import HtpConfig
from buildlib.container.manifest import (
    GENIE_CONFIG,
    GENIE_CONTRACT,
    HTP_CONFIG,
    METADATA,
    TOKENIZER,
    FileRecord,
    GraphsRecord,
    LossRecord,
    ModelRecord,
    PartKind,
    Scalar,
    SpeculationRecord,
    TargetRecord,
    build_metadata,
    file_name_problem,
    has_file,
)
from buildlib.container.op_packages import OpPackage
from buildlib.container.text_embedding import Configuration
from buildlib.errors import ContainerError
from buildlib.targets import Target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.htp_extensions import HtpContextConfig

_CORE: Mapping[str, object] = {"core_id": 0, "perf_profile": "burst", "rpc_control_latency": 100}
"""Settings of a core in the files that we write, where no option says otherwise."""


@dataclass(frozen=True, slots=True)
class ContainerFile:
    """A file for a container, and its kind."""

    path: Path
    kind: PartKind


@dataclass(frozen=True, slots=True)
class ContainerContents:
    """Contents of a container that is to be written.

    Attributes:
        binaries: context binaries in the order of the splits, by the names that they get.
        options: the builder's options, as dotted keys.
        toolchain: name and versions of everything that compiled.
        extras: embedding tables, LoRA adapters, binaries of a draft model; by the names that they
            get, which may lie in sub-folders.
        op_packages: those of the user that the target needs.
        contract: of the graphs.
        loss: of quantization.
    """

    target: Target
    model: ModelRecord
    graphs: GraphsRecord
    genie_config: Configuration
    htp_config: HtpConfig
    tokenizer: Path
    binaries: Mapping[str, Path]
    toolchain: Mapping[str, str]
    options: Mapping[str, Scalar | tuple[Scalar, ...]]
    extras: Mapping[str, ContainerFile] = field(default_factory=dict)
    op_packages: tuple[OpPackage, ...] = ()
    contract: str = GENIE_CONTRACT
    loss: LossRecord | None = None

    @property
    def further_files(self) -> Mapping[str, ContainerFile]:
        """Files beside binaries, tokenizer and configurations."""
        libraries = {
            name: ContainerFile(path, "op_package")
            for package in self.op_packages
            for name, path in package.files().items()
        }
        return {**self.extras, **libraries}


def write_container(
    draft: ContainerContents,
    dest: Path,
    *,
    exist_ok: bool = False,
    validate: Callable[[Path], None] = check_genie_config,
    speculation: Callable[[Path], SpeculationRecord | None] = lambda _folder: None,
) -> GenAIContainer:
    """Write a container; before it appears, Genie validates a configuration that it is to run.

    Args:
        draft: its contents.
        dest: its folder.
        exist_ok: whether a container there is replaced.
        validate: judges the configuration in a folder.
        speculation: compares the dialog in a folder with plain decoding, for the manifest.
    """
    _check_fit(draft, dest)
    with place_folder(dest, exist_ok=exist_ok) as scratch:
        files = _write_files(draft, scratch)
        if draft.contract == GENIE_CONTRACT:
            validate(scratch)
        metadata = build_metadata(
            model=draft.model,
            graphs=draft.graphs,
            target=_target_record(draft),
            toolchain=draft.toolchain,
            options=draft.options,
            files=files,
            speculation=speculation(scratch),
            loss=draft.loss,
            op_packages=tuple(package.in_container() for package in draft.op_packages),
            contract=draft.contract,
        )
        write_text(scratch / METADATA, metadata.to_json(), "configuration")
    return GenAIContainer(dest, metadata, draft.genie_config)


def _write_files(draft: ContainerContents, folder: Path) -> dict[str, FileRecord]:
    sources = {name: ContainerFile(source, "binary") for name, source in draft.binaries.items()}
    sources |= {TOKENIZER: ContainerFile(draft.tokenizer, "tokenizer"), **draft.further_files}
    files = {}
    with HashMemo.at(None) as memo:
        for name, file in sources.items():
            files[name] = copy_file(file.path, folder / name, file.kind)
            memo.remember(folder / name, files[name].sha256)
    for name, text in (
        (GENIE_CONFIG, draft.genie_config.to_json()),
        (HTP_CONFIG, draft.htp_config.to_json()),
    ):
        files[name] = write_text(folder / name, text, "configuration")
    return files


def _check_fit(draft: ContainerContents, dest: Path) -> None:
    """Check that configuration and files agree."""
    configured = set(draft.genie_config.referenced_files)
    needed = [*draft.binaries, TOKENIZER, HTP_CONFIG]
    files = {*needed, GENIE_CONFIG, *draft.further_files}
    odd = {name for name in configured if not has_file(files, name)} | set(needed) - configured
    if odd:
        names = ", ".join(sorted(odd))
        raise ContainerError(str(dest), f"configuration and files differ in {names}")
    twice = draft.further_files.keys() & {*needed, GENIE_CONFIG}
    if twice:
        raise ContainerError(str(dest), f"{min(twice)} is given twice")
    problem = file_name_problem(files)
    if problem:
        raise ContainerError(str(dest), problem)
    if draft.genie_config.context_length != draft.graphs.context_length:
        raise ContainerError(str(dest), "context length of configuration and graphs differ")
    if len(draft.binaries) != draft.graphs.splits:
        raise ContainerError(str(dest), "number of binaries and splits differ")


def _target_record(draft: ContainerContents) -> TargetRecord:
    target = draft.target
    return TargetRecord(
        name=str(target),
        soc_model=target.soc.soc_model,
        dsp_arch=target.soc.dsp_arch,
        emulator=target.emulator,
        weight_sharing=any(c.weight_sharing_enabled for c in draft.htp_config.contexts),
    )


def htp_config(compiled: CompileConfig | Target) -> HtpConfig:
    """Return the extensions that Genie runs binaries with, or those that suit a target.

    Options of the compiler alone are left out: those of graphs, and of contexts all but sharing.
    """
    config = CompileConfig.for_target(compiled) if isinstance(compiled, Target) else compiled
    values: dict[str, Any] = config.to_backend_extensions()
    values.pop("graphs", None)
    compiled_alone = set(HtpContextConfig.COMPILED)
    run = {k: v for k, v in config.context.as_extension().items() if k not in compiled_alone}
    values["context"] = {"weight_sharing_enabled": config.weight_sharing, **run}
    for device in values.get("devices", ()):
        device["cores"] = [{**_CORE, **core} for core in device.get("cores") or [{}]]
    return HtpConfig.model_validate(values)
