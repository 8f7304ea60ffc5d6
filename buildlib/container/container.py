"""`GenAIContainer`: a Genie bundle that knows what it is, and notices when it was changed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from buildlib.container.files import check_file, copy_file, write_text
from buildlib.container.genie_config import GenieConfig
from buildlib.container.htp_config import HtpConfig
from buildlib.container.layout import GENIE_CONFIG, HTP_CONFIG, METADATA, TOKENIZER
from buildlib.container.manifest import (
    ContainerMetadata,
    FileRecord,
    GraphsRecord,
    ModelRecord,
    Scalar,
    TargetRecord,
    build_metadata,
    read_metadata,
)
from buildlib.container.placement import placed_folder
from buildlib.container.referee import check_genie_config
from buildlib.errors import ContainerError, ContainerFileError
from buildlib.targets import Target


@dataclass(frozen=True, slots=True)
class ContainerDraft:
    """Everything that a container is made of, before it is one.

    Attributes:
        binaries: context binaries in the order of the splits, by the names that they get.
        options: the builder's options, as dotted keys.
        toolchain: name and versions of everything that compiled.
    """

    target: Target
    model: ModelRecord
    graphs: GraphsRecord
    genie_config: GenieConfig
    htp_config: HtpConfig
    tokenizer: Path
    binaries: Mapping[str, Path]
    toolchain: Mapping[str, str]
    options: Mapping[str, Scalar | tuple[Scalar, ...]]


@dataclass(frozen=True, slots=True)
class PartSize:
    """A file of a container in the size report."""

    name: str
    kind: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GenAIContainer:
    """A container on disk whose files are as they were written.

    Attributes:
        path: its folder.
    """

    path: Path
    metadata: ContainerMetadata
    genie_config: GenieConfig
    htp_config: HtpConfig

    @classmethod
    def load(cls, path: Path | str, *, verify: bool = True) -> "GenAIContainer":
        """Open a container.

        Args:
            path: its folder.
            verify: compare the content of every file with its hash, not just its size.

        Raises:
            ContainerVersionError: a later version of the project wrote it.
            ContainerFileError: a file is missing, or has changed since it was written.
            ContainerError: the folder is no container.
            GenieConfigError: a configuration in it is not readable.
        """
        folder = Path(path)
        metadata = read_metadata(folder)
        for name, record in metadata.files.items():
            check_file(folder, name, record, hashed=verify)
        genie_config = GenieConfig.from_file(folder / GENIE_CONFIG)
        for name in genie_config.referenced_files:
            if name not in metadata.files:
                raise ContainerFileError(str(folder), name, "is configured but is not in it")
        htp_config = HtpConfig.from_file(folder / HTP_CONFIG)
        return cls(folder, metadata, genie_config, htp_config)

    def save(self, dest: Path | str, *, exist_ok: bool = False) -> "GenAIContainer":
        """Copy the container to another folder, checking every file on the way.

        Args:
            dest: appears whole or not at all.
            exist_ok: replace a container that is there; anything else is never replaced.

        Raises:
            ContainerExistsError: the destination may not be replaced.
            ContainerFileError: a file of this container has changed meanwhile.
            ContainerError: the destination cannot be written.
        """
        destination = Path(dest)
        if destination.absolute() == self.path.absolute():
            return self
        with placed_folder(destination, exist_ok=exist_ok, may_replace=_is_container) as scratch:
            for name, record in self.metadata.files.items():
                if copy_file(self.path / name, scratch / name, record.kind) != record:
                    raise ContainerFileError(
                        str(self.path), name, "has changed since it was written"
                    )
            write_text(scratch / METADATA, self.metadata.to_json(), "configuration")
        return GenAIContainer(destination, self.metadata, self.genie_config, self.htp_config)

    @property
    def files(self) -> dict[str, Path]:
        """Every file that a device needs, by name: all but `metadata.json`."""
        return {name: self.path / name for name in self.metadata.files}

    @property
    def sizes(self) -> tuple[PartSize, ...]:
        """What takes how much space, the largest first."""
        parts = (PartSize(n, r.kind, r.size_bytes) for n, r in self.metadata.files.items())
        return tuple(sorted(parts, key=lambda part: (-part.size_bytes, part.name)))


def write_container(
    draft: ContainerDraft,
    dest: Path,
    *,
    exist_ok: bool = False,
    created_at: datetime | None = None,
    referee: Callable[[Path], None] = check_genie_config,
) -> GenAIContainer:
    """Make a container, with its configuration judged by Genie before it appears.

    Raises:
        GenieConfigError: Genie refuses the configuration.
        ContainerExistsError: the destination may not be replaced.
        ContainerError: the parts do not fit together, or the destination cannot be written.
    """
    _check_fit(draft, dest)
    with placed_folder(dest, exist_ok=exist_ok, may_replace=_is_container) as scratch:
        files = _write_files(draft, scratch)
        referee(scratch)
        metadata = build_metadata(
            model=draft.model,
            graphs=draft.graphs,
            target=_target_record(draft.target),
            toolchain=draft.toolchain,
            options=draft.options,
            files=files,
            created_at=created_at or datetime.now(UTC).replace(microsecond=0),
        )
        write_text(scratch / METADATA, metadata.to_json(), "configuration")
    return GenAIContainer(dest, metadata, draft.genie_config, draft.htp_config)


def _write_files(draft: ContainerDraft, folder: Path) -> dict[str, FileRecord]:
    files = {
        name: copy_file(source, folder / name, "binary") for name, source in draft.binaries.items()
    }
    files[TOKENIZER] = copy_file(draft.tokenizer, folder / TOKENIZER, "tokenizer")
    for name, text in (
        (GENIE_CONFIG, draft.genie_config.to_json()),
        (HTP_CONFIG, draft.htp_config.to_json()),
    ):
        files[name] = write_text(folder / name, text, "configuration")
    return files


def _check_fit(draft: ContainerDraft, dest: Path) -> None:
    """The configuration must speak of exactly the files that are given."""
    configured = set(draft.genie_config.referenced_files)
    given = {*draft.binaries, TOKENIZER, HTP_CONFIG}
    if configured != given:
        odd = ", ".join(sorted(configured ^ given))
        raise ContainerError(str(dest), f"configuration and files differ in {odd}")
    if draft.genie_config.dialog.context.size != draft.graphs.context_length:
        raise ContainerError(str(dest), "context length of configuration and graphs differ")
    if len(draft.binaries) != draft.graphs.splits:
        raise ContainerError(str(dest), "number of binaries and splits differ")


def _target_record(target: Target) -> TargetRecord:
    return TargetRecord(
        name=str(target),
        soc_model=target.soc.soc_model,
        dsp_arch=target.soc.dsp_arch,
        emulator=target.emulator,
        weight_sharing=target.weight_sharing,
    )


def _is_container(folder: Path) -> bool:
    try:
        read_metadata(folder)
    except ContainerError:
        return False
    return True
