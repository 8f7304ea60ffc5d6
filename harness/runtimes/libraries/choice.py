"""Sources of QNN and Genie for devices: wheels, the QAIRT SDK, and folders of the user's.

The SDK's layout is that of the vendor's public documents: `lib/<platform>/` and `bin/<platform>/`
of the tutorial for Genie on Android (80-63442-10, `no_lora.html`) and of genie-t2t-run's sample
code, `lib/hexagon-v<arch>/unsigned/` of the former and of "Backend" (`QNN/general/backend.html`).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from buildlib.paths import default_cache_root
from buildlib.targets import Soc
from buildlib.toolchains.ort_qnn.wheel import DISTRIBUTION, find_libraries
from buildlib.toolchains.qairt import ROOT_VARIABLES, sdk_root
from harness.errors import GenieMissingError
from harness.runtimes.libraries.base import (
    GenieLibraries,
    needed_libraries,
    profiling_readers,
)

FOLDERS_VARIABLE = "QNNFARM_LIBRARIES"
"""Environment variable: folders, separated as in `PATH`, with libraries in `FOLDER/<ABI>`."""
ANDROID, BOARD = "arm64-v8a", "aarch64"
PLATFORMS: Mapping[str, str] = MappingProxyType(
    {ANDROID: "aarch64-android", BOARD: "aarch64-oe-linux-gcc11.2"}
)
"""The SDK's platform for each ABI."""
_PROGRAMS = ("genie-t2t-run", "genie-app")
_ENCODER = "genie-t2e-run"  # older SDKs have none
_SET_SDK = f"set {ROOT_VARIABLES[0]} to an unpacked QAIRT SDK"


@dataclass(frozen=True, slots=True)
class LibrarySource:
    """Folders with libraries for devices of one ABI.

    Attributes:
        origin: what it is called, with its version.
        folders: searched in their order; the libraries of every Hexagon architecture may be there.
        advice: what to do where it lacks something.
        programs: folders with the SDK's runners; None where devices have Python.
    """

    origin: str
    folders: tuple[Path, ...]
    advice: str = ""
    programs: tuple[Path, ...] | None = None

    def find(self, soc: Soc) -> GenieLibraries:
        """Return the files that the SoC needs, and the readers of profiles that are there.

        Raises:
            GenieMissingError: names the first few files that are not there.
        """
        needed = needed_libraries(soc)
        files = _find_files((*needed, *profiling_readers(soc)), self.folders)
        programs: dict[str, Path] = {}
        wanted: tuple[str, ...] = ()
        if self.programs is not None:
            wanted = _PROGRAMS
            programs = _find_files((*_PROGRAMS, _ENCODER), self.programs)
        missing = [name for name in (*needed, *wanted) if name not in {**files, **programs}]
        if missing:
            more = f" and {len(missing) - 3} more files" if len(missing) > 3 else ""
            lacks = f"{self.origin} lacks {', '.join(missing[:3])}{more}"
            raise GenieMissingError(soc.name, f"{lacks}{self.advice and f': {self.advice}'}")
        return GenieLibraries(self.origin, files, programs)


def _find_files(names: Sequence[str], folders: Sequence[Path]) -> dict[str, Path]:
    paths = {name: [folder / name for folder in folders] for name in names}
    found = ((name, next(filter(Path.is_file, at), None)) for name, at in paths.items())
    return {name: path for name, path in found if path is not None}


def fetched_wheel(version: str) -> Path:
    """Return the folder for the libraries of a version of the wheel for Linux boards."""
    return default_cache_root() / "libraries" / f"{DISTRIBUTION}-{version}-{BOARD}"


def sdk_source(root: Path, abi: str, soc: Soc) -> LibrarySource:
    """Return the folders of an unpacked SDK for a SoC; its runners are used on Android."""
    platform = PLATFORMS[abi]
    folders = (root / "lib" / platform, root / "lib" / f"hexagon-{soc.dsp_arch}" / "unsigned")
    programs = (root / "bin" / platform,) if abi == ANDROID else None
    return LibrarySource(f"QAIRT SDK {root.resolve().name}", folders, f"look into {root}", programs)


def _sources(abi: str, soc: Soc, environment: Mapping[str, str]) -> Iterator[LibrarySource]:
    """Return the sources for an ABI, best first.

    A board takes the wheel of the compiler's version before the SDK, since a context binary may be
    read by a runtime that is as new as its compiler, and not by an older one.
    """
    named = [folder for folder in environment.get(FOLDERS_VARIABLE, "").split(os.pathsep) if folder]
    if named:
        folders = tuple(Path(folder).expanduser() / abi for folder in named)
        programs = folders if abi == ANDROID else None
        advice = f"{FOLDERS_VARIABLE} names folders with files for this ABI in FOLDER/{abi}"
        yield LibrarySource(os.pathsep.join(map(str, folders)), folders, advice, programs)
    if abi == BOARD:
        version = find_libraries().version
        folder = fetched_wheel(version)
        if folder.is_dir():
            advice = f"remove {folder}, then `qnnfarm libraries fetch` gets it anew"
            yield LibrarySource(f"{DISTRIBUTION} {version} for {BOARD}", (folder,), advice)
    root = sdk_root(environment)
    if root is not None:
        yield sdk_source(root, abi, soc)


def find_genie(abi: str, soc: Soc, environment: Mapping[str, str] = os.environ) -> GenieLibraries:
    """Find the libraries for devices of an ABI, in the first source that there is.

    Args:
        abi: as the device calls it; Linux says `aarch64` where Android says `arm64-v8a`.

    Raises:
        GenieMissingError: they are not on this machine; says how to get them.
        ToolchainMissingError: the wheel that compiles is not installed.
    """
    if abi == "x86_64":
        wheel = find_libraries()
        return GenieLibraries(f"{DISTRIBUTION} {wheel.version}", wheel.runtime())
    if abi in PLATFORMS:
        for source in _sources(abi, soc, environment):
            return source.find(soc)
    match abi:
        case "aarch64":
            advice = f"`qnnfarm libraries fetch` gets it from PyPI; or {_SET_SDK}"
        case "arm64-v8a":
            advice = f"it comes with the QAIRT SDK: {_SET_SDK}, or {FOLDERS_VARIABLE} to folders"
        case _:
            advice = "there is none for that ABI"
    raise GenieMissingError(soc.name, f"for {abi or 'no known ABI'}, {advice}")
