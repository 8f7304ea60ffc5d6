"""Contents of artifacts: logs, profiles and traces of runs, kept by SHA-256 beside the database.

The database has the names (`Run` to `Artifact`), this folder the contents: equal ones once. A
SQLite file `results.db` has them in `results.db.artifacts`. A database on a server has them in
`QNNFARM_ARTIFACTS_DIR`, a folder that its hosts share, or else in the state folder of the measuring
user; then other hosts see the names alone.
"""

import hashlib
import os
import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from buildlib.files import atomic_write, sync_folder
from harness.errors import ArtifactError
from harness.paths import safe_file_name, state_dir

MAX_ARTIFACT_BYTES = 256 << 20
_GRACE_S = 3600.0
"""A content may be this much older than the row that names it."""


@dataclass(frozen=True, slots=True)
class ArtifactFolder:
    """A folder of contents by their SHA-256."""

    folder: Path

    @classmethod
    def of(cls, location: str) -> "ArtifactFolder":
        """Return the folder of a database, by its location without password."""
        if "://" not in location:
            path = Path(location)
            return cls(path.with_name(f"{path.name}.artifacts"))
        shared = os.environ.get("QNNFARM_ARTIFACTS_DIR")
        if shared:
            return cls(Path(shared))
        # One folder for each database of each server, whoever asks.
        name = safe_file_name(location.rpartition("@")[2])
        return cls(state_dir() / "artifacts" / name)

    def path(self, sha256: str) -> Path:
        """Return where a content is, or would be."""
        return self.folder / sha256[:2] / sha256

    def put(self, content: bytes) -> str:
        """Keep a content; it is on the disk before this returns its SHA-256.

        Raises:
            ArtifactError: it is too large, or cannot be written.
        """
        if len(content) > MAX_ARTIFACT_BYTES:
            reason = f"it has {len(content)} bytes, and at most {MAX_ARTIFACT_BYTES} are kept"
            raise ArtifactError(str(self.folder), reason)
        sha256 = hashlib.sha256(content).hexdigest()
        path = self.path(sha256)
        try:
            if self._is_kept(path, len(content)):
                path.touch()  # younger than what `sweep` removes
            else:
                with atomic_write(path) as file:
                    file.write(content)
                sync_folder(path.parent)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ArtifactError(str(path), f"it cannot be written: {reason}") from error
        return sha256

    def read(self, sha256: str) -> bytes:
        """Read a content, and check that it is the one that was kept."""
        path = self.path(sha256)
        try:
            content = path.read_bytes()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ArtifactError(str(path), f"it cannot be read: {reason}") from error
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ArtifactError(str(path), "it is damaged: its content has another SHA-256")
        return content

    def sweep(self, named: AbstractSet[str]) -> int:
        """Remove the contents that no run names any more; return the bytes.

        Young ones stay: a content is written before the row that names it.
        """
        removed = 0
        newest = time.time() - _GRACE_S
        for path in self.folder.glob("??/*"):
            try:
                stat = path.stat()
                if path.name not in named and stat.st_mtime < newest:
                    path.unlink()
                    removed += stat.st_size
            except OSError:  # another process removed it
                continue
        return removed

    @staticmethod
    def _is_kept(path: Path, size: int) -> bool:
        try:
            return path.stat().st_size == size
        except FileNotFoundError:
            return False
