"""`Bundle`: all that a runtime needs on a device, before any of it is pushed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from buildlib.targets import Soc
from harness.deploy.deployment import DeployFile
from harness.deploy.digests import hash_files


@dataclass(frozen=True, slots=True)
class BundleRecord:
    """A file of a bundle with its content's digest.

    Attributes:
        origin: see `DeployFile`.
        size: in bytes.
    """

    name: str
    origin: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """Files and environment of a runtime on devices of one kind.

    Attributes:
        abi: as the devices call it: `arm64-v8a`, `aarch64`, `x86_64`.
        soc: of the devices.
        files: by their names in the run folder; `deploy` takes them as they are.
        environment: variables of the runtime's processes, beside those that `run.sh` sets to the
            run folder: `LD_LIBRARY_PATH`, `ADSP_LIBRARY_PATH` and `PATH`.
    """

    abi: str
    soc: Soc
    files: Mapping[str, DeployFile]
    environment: Mapping[str, str] = field(default_factory=dict)

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
            BundleRecord(name, file.origin, digests[file.path].size, digests[file.path].sha256)
            for name, file in self.files.items()
        )
