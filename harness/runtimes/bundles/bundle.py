"""`Bundle`: all that a runtime needs on a device, before any of it is pushed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from buildlib.targets import Soc
from harness.deploy.deployment import DeployFile
from harness.deploy.digests import hash_files

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
        soc: of the devices.
        files: by their names in the run folder; `deploy` takes them as they are.
    """

    abi: str
    soc: Soc
    files: Mapping[str, DeployFile]

    def add(self, files: Mapping[str, DeployFile]) -> "Bundle":
        """Return a bundle with these files, too; they replace those of the same names."""
        return replace(self, files={**self.files, **files})

    def records(self) -> tuple[BundleRecord, ...]:
        """Hash all files, which is remembered until they change.

        Raises:
            HostFileError: a file is missing or unreadable, or changed meanwhile.
        """
        digests = hash_files({file.path for file in self.files.values()})
        return tuple(
            BundleRecord(name, str(file.path), file.origin, digest.size, digest.sha256)
            for name, file in self.files.items()
            for digest in (digests[file.path],)
        )
