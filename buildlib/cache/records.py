"""Records of an entry: the documented sidecar, and the list that proves the entry whole.

`builder_cache_info.json` has the five documented fields. `.files.json` has the rest of the hash's
input, and size and hash of every file. Fields: "Gen AI Builder Overview", docs.qualcomm.com
80-87189-2.
"""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from buildlib.cache.file_hashes import HashMemo
from buildlib.cache.key import StageKey, plain_config
from buildlib.cache.layout import FILES, LAST_USED, SIDECAR, entry_name
from buildlib.errors import CacheError, InputFileError
from buildlib.files import sync_file
from buildlib.validation import first_fault

_MAX_BYTES = 64 << 20

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Record = TypeVar("Record", bound="_Record")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EntryInfo(_Record):
    """`builder_cache_info.json`.

    Attributes:
        source: the input, for people to read.
        config: the stage's configuration as JSON values.
        hash: SHA-256 over all that the output depends on.
    """

    operation: Annotated[str, Field(pattern=r"^[a-z]+$")]
    source: str
    config: dict[str, JsonValue]
    hash: Sha256
    created_at: AwareDatetime


class StoredFile(_Record):
    """One file that a stage made."""

    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class EntryFiles(_Record):
    """`.files.json`: the hash's input beside the configuration, and every file.

    Attributes:
        subject: which graph or part, for people to read.
        sources: the hashes of the stage's inputs.
    """

    subject: str = ""
    sources: tuple[str, ...]
    versions: dict[str, str]
    code_sha256: str
    files: dict[str, StoredFile]

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files.values())


def write_records(
    folder: Path, key: StageKey, source: Path, memo: HashMemo, *, subject: str = ""
) -> None:
    """Write both records for the output in `folder`, durably, before others can see the folder."""
    files = {name: _stored(folder / name, memo) for name in walk(folder)}
    described = EntryFiles(
        subject=subject,
        sources=tuple(key.source_hashes),
        versions=dict(key.versions),
        code_sha256=key.code_sha256,
        files=files,
    )
    info = EntryInfo(
        operation=key.operation,
        source=str(source),
        config=plain_config(key.config),
        hash=key.digest(),
        created_at=datetime.now(UTC),
    )
    (folder / LAST_USED).touch()
    for name, record in ((FILES, described), (SIDECAR, info)):
        with (folder / name).open("w", encoding="utf-8") as file:
            file.write(record.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_info(folder: Path) -> EntryInfo:
    """Read the sidecar of an entry.

    Raises:
        CacheError: it is missing, or not one.
    """
    return _read(folder, SIDECAR, EntryInfo)


def read_files(folder: Path) -> EntryFiles:
    """Read the list of an entry's files."""
    return _read(folder, FILES, EntryFiles)


def find_problem(folder: Path, memo: HashMemo, *, reread: bool = False) -> str | None:
    """Return the fault of an entry, or `None` if it is as written.

    Args:
        folder: the entry.
        memo: files that have not changed since they were hashed are not read.
        reread: read all files.
    """
    try:
        info, described = read_info(folder), read_files(folder)
    except CacheError as error:
        return error.reason
    if folder.name != entry_name(info.operation, info.hash) or not _is_hash_of(info, described):
        return f"{SIDECAR} is not that of this entry"
    return _problem_of_files(folder, described.files, memo, reread=reread)


def _is_hash_of(info: EntryInfo, described: EntryFiles) -> bool:
    key = StageKey(
        info.operation,
        info.config,
        described.sources,
        described.versions,
        described.code_sha256,
    )
    try:
        return key.digest() == info.hash
    except ValueError:  # JSON of others may hold numbers that ours never does
        return False


def _problem_of_files(
    folder: Path, files: Mapping[str, StoredFile], memo: HashMemo, *, reread: bool
) -> str | None:
    try:
        sizes = walk(folder)
        odd = sorted(set(sizes) ^ set(files))
        if odd:
            return f"{odd[0]} {'is missing' if odd[0] in files else 'does not belong to it'}"
        for name, file in files.items():
            size = sizes[name]
            if size != file.size_bytes:
                return f"{name} has {size} bytes where {file.size_bytes} were written"
        for name, file in files.items():
            if memo.digest(folder / name, reread=reread).sha256 != file.sha256:
                return f"{name} has changed since it was written"
    except InputFileError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None


def walk(folder: Path) -> dict[str, int]:
    """Return the size of every output file in a folder, by relative name."""
    sizes: dict[str, int] = {}
    queue = [""]
    while queue:
        below = queue.pop()
        with os.scandir(folder / below) as entries:
            for item in entries:
                name = f"{below}{item.name}"
                if name in {SIDECAR, FILES, LAST_USED}:
                    continue
                if item.is_dir(follow_symlinks=False):
                    queue.append(f"{name}/")
                elif not item.is_file(follow_symlinks=False) or not name.isprintable():
                    raise InputFileError(item.path, "no entry of the cache can hold it")
                else:
                    sizes[name] = item.stat(follow_symlinks=False).st_size
    return dict(sorted(sizes.items()))


def _stored(path: Path, memo: HashMemo) -> StoredFile:
    digest = memo.digest(path)
    memo.remember(path, digest.sha256)
    sync_file(path)
    return StoredFile(size_bytes=digest.size, sha256=digest.sha256)


def _read(folder: Path, name: str, kind: type[Record]) -> Record:
    path = folder / name
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CacheError(str(folder), f"{name} is larger than {_MAX_BYTES} bytes")
        return kind.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise CacheError(str(folder), f"{name} cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise CacheError(str(folder), f"{name} {first_fault(error, kind)}") from error
