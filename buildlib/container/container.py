"""`GenAIContainer`: a Genie bundle with a manifest that has the hash of every file."""

import hashlib
import os
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, Literal, Self, get_args

from buildlib.cache.file_hashes import HashMemo
from buildlib.container.genie_config import GenieConfig
from buildlib.container.manifest import (
    ARCHIVE_SUFFIX,
    GENIE_CONFIG,
    HTP_CONFIG,
    KV_BYTES,
    METADATA,
    PRECISION,
    ContainerMetadata,
    FileRecord,
    PartKind,
    archive_stem,
    has_file,
    is_container,
    read_metadata,
)
from buildlib.container.text_embedding import (
    Configuration,
    TextEmbeddingConfig,
    read_configuration,
)
from buildlib.errors import (
    ContainerError,
    InputFileError,
    InvalidOptionError,
)
from buildlib.files import atomic_folder, atomic_write, sync_folder
from buildlib.paths import user_path

if TYPE_CHECKING:
    from buildlib.container.htp_config import HtpConfig

_CHUNK = 4 * 1024 * 1024


def copy_file(source: Path, destination: Path, kind: PartKind) -> FileRecord:
    """Copy to a new file, durably, and describe it; makes the folder for it."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with destination.open("xb") as writer:
        record = copy_into(source, writer, kind)
        writer.flush()
        os.fsync(writer.fileno())
    return record


def copy_into(source: Path, sink: IO[bytes], kind: PartKind) -> FileRecord:
    """Write a file's bytes into `sink`, and describe them."""
    digest = hashlib.sha256()
    size = 0
    with source.open("rb") as reader:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            size += sink.write(chunk)
    return FileRecord(sha256=digest.hexdigest(), size_bytes=size, kind=kind)


def write_text(path: Path, text: str, kind: PartKind) -> FileRecord:
    """Write a new file, durably, and describe it."""
    data = text.encode()
    with path.open("xb") as writer:
        writer.write(data)
        writer.flush()
        os.fsync(writer.fileno())
    return FileRecord(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data), kind=kind)


_EDITED = "was edited: -O of the build sets the HTP's options, --genie-config another dialog"


def file_error(folder: Path, name: str, reason: str) -> ContainerError:
    """Return the error of a file of a container that is missing, changed, or must not be there."""
    return ContainerError(str(folder), f"file {name!r} {reason}; build or copy it again")


def check_file(folder: Path, name: str, record: FileRecord, memo: HashMemo | None = None) -> None:
    """Compare a file with its record: its size, and its content if there is a memo of hashes."""
    path = folder / name
    try:
        if not path.is_file():
            raise file_error(folder, name, "is missing")
        size = path.stat().st_size
        if size != record.size_bytes:
            reason = f"has {size} bytes where {record.size_bytes} were written"
            raise file_error(folder, name, _EDITED if record.kind == "configuration" else reason)
        if memo is None:
            return
        digest = memo.digest(path).sha256
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise file_error(folder, name, reason) from error
    except InputFileError as error:
        raise file_error(folder, name, f"cannot be read ({error.reason})") from error
    if digest != record.sha256:
        reason = "has changed since it was written"
        raise file_error(folder, name, _EDITED if record.kind == "configuration" else reason)


@contextmanager
def place_folder(destination: Path, *, exist_ok: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes `destination` when the block succeeds.

    Args:
        destination: an empty folder there is replaced in any case.
        exist_ok: whether a container there may be replaced.
    """
    destination = user_path(destination).absolute()
    check_replaceable(destination, exist_ok=exist_ok)
    try:
        with atomic_folder(destination) as scratch:
            yield scratch
            check_replaceable(destination, exist_ok=exist_ok)
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        raise ContainerError(str(destination), reason) from error


@contextmanager
def place_file(destination: Path) -> Iterator[BinaryIO]:
    """Yield a file that becomes `destination` when the block succeeds."""
    destination = user_path(destination).absolute()
    try:
        if destination.exists() or destination.is_symlink():
            raise FileExistsError
        with atomic_write(destination, replace=False) as sink:
            yield sink
        sync_folder(destination.parent)
    except FileExistsError as error:
        reason = "is there already; name another file"
        raise ContainerError(str(destination), reason) from error
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        raise ContainerError(str(destination), reason) from error


def check_replaceable(destination: Path, *, exist_ok: bool) -> None:
    """Refuse a destination where placing a folder would lose something."""
    destination = user_path(destination)
    if not destination.exists() and not destination.is_symlink():
        return
    path = str(destination)
    if destination.is_symlink() or not destination.is_dir():
        raise ContainerError(path, "is there already and is not a folder")
    if not any(destination.iterdir()):
        return
    if not exist_ok:
        raise ContainerError(
            path, "is there already; name another folder, or replace it (`--overwrite`)"
        )
    if not is_container(destination):
        raise ContainerError(path, "holds something else than a container; not replaced")


class GenAIContainerable:
    """Base of the containers; its `load` gives the kind of container that the folder holds.

    Documented as `GenAIContainerable.load(path)`, docs.qualcomm.com 80-87189-2
    (`qairt-gen-ai-api-gen-ai-builder-containers`).
    """

    path: Path
    metadata: ContainerMetadata

    @classmethod
    def load(cls, path: str | PathLike[str], *, verify: bool = True) -> Self:
        """Open the container in a folder.

        Args:
            path: the folder.
            verify: compare the content of every file with its hash, not just its size.

        Raises:
            ContainerError: any of its kinds; the folder is not a container, or was changed.
            InputFileError: a configuration in it is not readable.
            TypeError: the folder holds another kind of container than this class.
        """
        container = GenAIContainer.load(path, verify=verify)  # the one kind that metadata can name
        if not isinstance(container, cls):
            raise TypeError(f"{path} holds a {type(container).__name__}, no {cls.__name__}")
        return container


ExportFormat = Literal["genie_bundle", "zip"]


@dataclass(frozen=True, slots=True)
class PartSize:
    """A file of a container in the size report."""

    name: str
    kind: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GenAIContainer(GenAIContainerable):
    """A container on disk with unchanged files.

    Attributes:
        path: its folder.
        configuration: of Genie: a dialog, or of a text encoder an embedding.
    """

    path: Path
    metadata: ContainerMetadata
    configuration: Configuration

    @classmethod
    def load(cls, path: str | PathLike[str], *, verify: bool = True) -> "GenAIContainer":
        """Open a container.

        Args:
            path: its folder.
            verify: compare the hash of every file, not just its size. Files that have not changed
                since they were last hashed are not read.

        Raises:
            ContainerError: a file is missing, or has changed since it was written; or it is no
                container, or of a later version of the project.
            InputFileError: a configuration in it is not readable.
        """
        folder = user_path(path)
        metadata = read_metadata(folder)
        _check_files(folder, metadata, verify=verify)
        configuration = read_configuration(folder / GENIE_CONFIG)
        for name in configuration.referenced_files:
            if not has_file(metadata.files, name):
                raise file_error(folder, name, "is configured but is not in it")
        return cls(folder, metadata, configuration)

    @property
    def embeds(self) -> bool:
        """True if it holds a text encoder, which embeds texts and answers no prompts."""
        return isinstance(self.configuration, TextEmbeddingConfig)

    @property
    def genie_config(self) -> GenieConfig:
        """The dialog."""
        if not isinstance(self.configuration, GenieConfig):
            reason = "holds a text encoder, which answers no prompts: use `qnnfarm embed`"
            raise ContainerError(str(self.path), reason)
        return self.configuration

    @property
    def htp_config(self) -> "HtpConfig":
        """The file of QNN's HTP extensions, which a run hands to Genie unread."""
        from buildlib.container.htp_config import HtpConfig

        return HtpConfig.from_file(self.files[HTP_CONFIG])

    @property
    def embedding_config(self) -> TextEmbeddingConfig:
        """The embedding."""
        if not isinstance(self.configuration, TextEmbeddingConfig):
            reason = "holds a dialog, which embeds no texts: build a text encoder from its ONNX"
            raise ContainerError(str(self.path), reason)
        return self.configuration

    def save(self, dest: str | PathLike[str], *, exist_ok: bool = False) -> "GenAIContainer":
        """Copy the container to another folder, checking every file on the way.

        Nothing is written if the folder holds this very container.

        Args:
            dest: a folder, which appears atomically.
            exist_ok: replace an existing container; anything else is never replaced.

        Raises:
            ContainerError: the destination may not be replaced; or a file of this container has
                changed meanwhile; or the destination cannot be written.
        """
        destination = user_path(dest)
        if destination.resolve() == self.path.resolve():
            return self
        self._refuse_inside(destination)
        if exist_ok and self._is_at(destination):
            return GenAIContainer(destination, self.metadata, self.configuration)
        with place_folder(destination, exist_ok=exist_ok) as scratch:
            self._copy_to(scratch)
            write_text(scratch / METADATA, self.metadata.to_json(), "configuration")
        return GenAIContainer(destination, self.metadata, self.configuration)

    def export(self, dest: str | PathLike[str], format: ExportFormat = "genie_bundle") -> Path:  # noqa: A002 - the documented word
        """Export the bundle: the files that Genie reads, without our manifest.

        Args:
            dest: a new folder for the bundle. For an archive a new file `*.zip`, or the folder for
                `<model>.genie.zip`.
            format: `genie_bundle` is a folder as AI Hub's export makes it, `zip` that in a file.
                Equal containers give equal archives.

        Raises:
            InvalidOptionError: there is no such format.
            ContainerError: the destination is there; nothing is replaced; or a file of this
                container has changed meanwhile; or the destination cannot be written.
        """
        if format not in get_args(ExportFormat):
            raise InvalidOptionError("format", f"{format!r} is none", get_args(ExportFormat))
        destination = user_path(dest)
        self._refuse_inside(destination)
        if format == "zip":
            if destination.suffix != ".zip":
                destination /= archive_stem(self.metadata.model.name) + ARCHIVE_SUFFIX
            write_archive(self.path, self.metadata.files, destination)
        else:
            with place_folder(destination, exist_ok=False) as scratch:
                self._copy_to(scratch)
        return destination

    def _refuse_inside(self, destination: Path) -> None:
        if destination.resolve().is_relative_to(self.path.resolve()):
            raise ContainerError(str(destination), "lies in the container itself")

    def _is_at(self, folder: Path) -> bool:
        """Return whether a folder holds the files of this container and nothing else."""
        try:
            names = {
                path.relative_to(folder).as_posix()
                for path in folder.rglob("*")
                if not path.is_dir() or path.is_symlink()
            }
            if names != {*self.metadata.files, METADATA}:
                return False
            if (folder / METADATA).read_text(encoding="utf-8") != self.metadata.to_json():
                return False
            _check_files(folder, self.metadata, verify=True)
        except (OSError, UnicodeDecodeError, ContainerError):
            return False
        return not any((folder / name).is_symlink() for name in names)

    def _copy_to(self, folder: Path) -> None:
        """Copy all files into a folder."""
        with HashMemo.at(None) as memo:
            for name, record in self.metadata.files.items():
                check_file(self.path, name, record)
                if copy_file(self.path / name, folder / name, record.kind) != record:
                    raise file_error(self.path, name, "has changed since it was written")
                memo.remember(folder / name, record.sha256)

    @property
    def precision(self) -> str | None:
        """Bits of the stored linear layers: `W4A16`, or `W4/8A16` where they differ.

        `KV16` follows where keys and values have 16. Embedding and output projection do not count.
        None for containers of older versions.
        """
        text = self.metadata.model.quantization.get(PRECISION)
        return text if isinstance(text, str) else None

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes of the KV cache at the largest context length; a decode step reads all of them.

        None for containers of older versions, and those without a cache.
        """
        per_token = self.metadata.model.quantization.get(KV_BYTES)
        length = self.metadata.graphs.context_length
        return per_token * length if isinstance(per_token, int) else None

    @property
    def files(self) -> dict[str, Path]:
        """Every file that a device needs, by name: all but `metadata.json`."""
        return {name: self.path / name for name in self.metadata.files}

    @property
    def binaries(self) -> dict[str, Path]:
        """The context binaries by name."""
        return {
            name: self.files[name]
            for name, record in self.metadata.files.items()
            if record.kind == "binary"
        }

    @property
    def sizes(self) -> tuple[PartSize, ...]:
        """Files by size, the largest first."""
        parts = (PartSize(n, r.kind, r.size_bytes) for n, r in self.metadata.files.items())
        return tuple(sorted(parts, key=lambda part: (-part.size_bytes, part.name)))

    @property
    def sizes_by_kind(self) -> dict[str, int]:
        """Bytes of each kind of file, the largest first."""
        sizes: Counter[str] = Counter()
        for part in self.sizes:
            sizes[part.kind] += part.size_bytes
        return dict(sizes.most_common())


def _check_files(folder: Path, metadata: ContainerMetadata, *, verify: bool) -> None:
    for name, record in metadata.files.items():
        check_file(folder, name, record)
    if verify:
        with HashMemo.at(None) as memo:
            for name, record in metadata.files.items():
                check_file(folder, name, record, memo)


_EARLIEST = (1980, 1, 1, 0, 0, 0)
_UNIX = 3


def write_archive(folder: Path, files: Mapping[str, FileRecord], destination: Path) -> None:
    """Write the files of a folder as `<model>.genie.zip`, below one folder named as the archive.

    Equal containers give equal bytes: files stand in the order of their names, with one time and
    one mode, and are stored uncompressed, since weights hardly get smaller.
    """
    top = destination.name.removesuffix(ARCHIVE_SUFFIX).removesuffix(".zip") or "bundle"
    with (
        place_file(destination) as sink,
        zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, strict_timestamps=True) as archive,
    ):
        for name, record in sorted(files.items()):
            check_file(folder, name, record)
            header = zipfile.ZipInfo(f"{top}/{name}", _EARLIEST)
            header.create_system = _UNIX
            header.external_attr = (stat.S_IFREG | 0o644) << 16
            header.file_size = record.size_bytes  # decides between 32 and 64 bits
            with archive.open(header, "w") as member:
                copy = copy_into(folder / name, member, record.kind)
            if copy != record:
                raise file_error(folder, name, "has changed since it was written")
