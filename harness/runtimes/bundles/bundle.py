"""`Bundle`: all that a runtime needs on a device, before any of it is pushed."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from buildlib.paths import user_path
from buildlib.targets import Soc
from harness.deploy.deploy import can_be_named
from harness.deploy.deployment import DeployFile
from harness.deploy.digests import hash_files
from harness.errors import WrongUseError

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {"LD_LIBRARY_PATH": "RUN_DIR", "ADSP_LIBRARY_PATH": "RUN_DIR", "PATH": "RUN_DIR:$PATH"}
)
"""Environment that `run.sh` gives every process; `RUN_DIR` is the run folder."""


@dataclass(frozen=True, slots=True)
class BundleRecord:
    """A file of a bundle with its content's digest.

    Attributes:
        path: on this host.
        origin: see `DeployFile`.
        size: in bytes.
    """

    name: str
    path: str
    origin: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """Files of a runtime on devices of one kind.

    Attributes:
        abi: as the devices call it: `arm64-v8a`, `aarch64`, `x86_64`.
        soc: of the devices; None if it is unknown, and nothing in the bundle depends on it.
        files: by their names in the run folder; `deploy` takes them as they are.
    """

    abi: str
    soc: Soc | None
    files: Mapping[str, DeployFile]

    def add(self, files: Mapping[str, DeployFile]) -> "Bundle":
        """Return a bundle with these files, too; they replace those of the same names."""
        return replace(self, files={**self.files, **files})

    def records(self) -> tuple[BundleRecord, ...]:
        """Hash all files, which is remembered until they change."""
        digests = hash_files({file.path for file in self.files.values()})
        return tuple(
            BundleRecord(name, str(file.path), file.origin, digest.size, digest.sha256)
            for name, file in self.files.items()
            for digest in (digests[file.path],)
        )


def pushed_files(texts: Iterable[str], folder: Path = Path()) -> dict[str, DeployFile]:
    """Read files of the user's for a bundle, each as `FILE` or `FILE:NAME`.

    Args:
        texts: the whole text is the file if there is one of that name.
        folder: base of relative paths.
    """
    files: dict[str, DeployFile] = {}
    for text in texts:
        path, name = folder / user_path(text), ""
        if not path.is_file() and ":" in text:
            file, _, name = text.rpartition(":")
            path = folder / user_path(file)
        if not path.is_file():
            raise WrongUseError(f"--push {text}: there is no file {path}")
        name = name or path.name
        if not can_be_named(name) or name in files:
            reason = "is given twice" if name in files else "cannot be a file's name there"
            raise WrongUseError(f"--push {text}: {name!r} {reason}")
        path = path.absolute()
        files[name] = DeployFile(path, executable=os.access(path, os.X_OK), origin="--push")
    return files
