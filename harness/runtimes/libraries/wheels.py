"""The wheels of `onnxruntime-qnn`: the one that is installed, and the one for Linux boards."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from buildlib.paths import default_cache_root
from buildlib.targets import Soc
from buildlib.toolchains.ort_qnn.wheel import DISTRIBUTION, find_libraries
from harness.errors import GenieMissingError
from harness.runtimes.libraries.base import GenieLibraries, cpu_libraries, hexagon_library

_FOLDER = "libraries"


def installed_wheel() -> GenieLibraries:
    """Find the wheel for devices that are x86_64 as this machine is: the emulator, of any SoC.

    Raises:
        ToolchainMissingError: the wheel is not installed, or not whole.
    """
    libraries = find_libraries()
    return GenieLibraries(f"{DISTRIBUTION} {libraries.version}", libraries.runtime())


@dataclass(frozen=True, slots=True)
class FetchedWheel:
    """For Linux boards: the libraries of the wheel for aarch64, of the compiler's own version.

    `fetch_wheel` puts them there.
    """

    folder: Path
    version: str

    @classmethod
    def of_the_compiler(cls) -> Self:
        """Locate the fetched libraries of the compiling wheel's version.

        Raises:
            ToolchainMissingError: that one is not installed.
        """
        version = find_libraries().version
        return cls(default_cache_root() / _FOLDER / f"{DISTRIBUTION}-{version}-aarch64", version)

    def find(self, soc: Soc) -> GenieLibraries | None:
        """Return the files that the SoC needs, or `None` if nothing was fetched.

        Raises:
            GenieMissingError: it was, and is not whole.
        """
        if not self.folder.is_dir():
            return None
        names = (*cpu_libraries(soc), hexagon_library(soc))
        files = {name: self.folder / name for name in names}
        missing = [name for name, path in files.items() if not path.is_file()]
        if missing:
            reason = f"{self.folder} lacks {', '.join(missing)}"
            raise GenieMissingError(soc.name, f"{reason}; `qnnfarm libraries fetch` gets it anew")
        return GenieLibraries(f"{DISTRIBUTION} {self.version} for aarch64", files)
