"""The stage cache of the Gen AI Builder, in the documented layout.

    <cache_root>/<model>/<operation>_<first 32 hex of the hash>/
        builder_cache_info.json     operation, source, config, hash, created_at
        ...                         what the stage made

A stage's hash is the SHA-256 of its operation, its options and the hashes of what it reads, so
hashes form a chain: changing an option changes the hash of that stage and of all after it, and of
nothing else.

Layout and the five fields: "Gen AI Builder Overview", docs.qualcomm.com 80-87189-2.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import platformdirs
from filelock import FileLock

Operation = Literal["export", "arcl", "transform", "convert", "compile", "package"]

SIDECAR = "builder_cache_info.json"
_HASH_IN_NAME = 32


def default_cache_root() -> Path:
    """Folder of everything that can be built again; `QNNFARM_CACHE_DIR` overrides it."""
    override = os.environ.get("QNNFARM_CACHE_DIR")
    return Path(override) if override else Path(platformdirs.user_cache_dir("qnnfarm"))


@dataclass(frozen=True)
class StageKey:
    """What a stage's output depends on: its operation, its options, and what it reads."""

    operation: Operation
    config: Mapping[str, object]
    source_hashes: Sequence[str]

    def digest(self) -> str:
        """SHA-256 in hex; the order of options does not matter, that of sources does."""
        canonical = json.dumps(
            {
                "operation": self.operation,
                "config": self.config,
                "sources": list(self.source_hashes),
            },
            sort_keys=True,
            separators=(",", ":"),
            default=str,
        )
        return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True)
class CacheEntry:
    """A finished stage: its folder, its full hash, and whether it was there already."""

    operation: Operation
    folder: Path
    hash: str
    reused: bool


class StageCache:
    """Stage outputs of one model below `<cache_root>/<model>`.

    An entry appears whole or not at all: it is made in a temporary folder beside its place and
    renamed. Two builds that want the same entry at once wait for each other, and the second reuses
    what the first made.
    """

    def __init__(self, cache_root: Path, model_name: str) -> None:
        self._folder = cache_root / model_name

    def get_or_build(
        self, key: StageKey, source: Path, build: Callable[[Path], None]
    ) -> CacheEntry:
        """Returns the entry of `key`; `build(folder)` fills an empty folder when it is not there.

        Args:
            key: what the output depends on.
            source: the input to name in the sidecar, for people to read.
            build: fills the folder it is given; what it raises passes through, and leaves no entry.
        """
        digest = key.digest()
        place = self._folder / f"{key.operation}_{digest[:_HASH_IN_NAME]}"
        if _is_whole(place, digest):
            return CacheEntry(key.operation, place, digest, reused=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self._folder / f".{place.name}.lock"):
            if _is_whole(place, digest):
                return CacheEntry(key.operation, place, digest, reused=True)
            shutil.rmtree(place, ignore_errors=True)
            with _temporary_sibling(place) as scratch:
                build(scratch)
                _write_sidecar(scratch, key, source, digest)
                scratch.rename(place)
        return CacheEntry(key.operation, place, digest, reused=False)


def _is_whole(place: Path, digest: str) -> bool:
    """Whether an entry has all its files, in the sizes that were written down last of all."""
    try:
        info = json.loads((place / SIDECAR).read_text())
        sizes = json.loads((place / ".files.json").read_text())
        return bool(info["hash"] == digest and sizes == _sizes(place))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in {SIDECAR, ".files.json"}
    }


def _write_sidecar(folder: Path, key: StageKey, source: Path, digest: str) -> None:
    (folder / ".files.json").write_text(json.dumps(_sizes(folder), indent=1))
    info = {
        "operation": key.operation,
        "source": str(source),
        "config": {name: str(value) for name, value in sorted(key.config.items())},
        "hash": digest,
        "created_at": datetime.now(UTC).isoformat(),
    }
    with (folder / SIDECAR).open("w") as file:
        json.dump(info, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _temporary_sibling(place: Path) -> Iterator[Path]:
    """An empty folder beside `place`, removed again unless it was renamed away."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    scratch.chmod(0o755)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
