"""Sources of QNN, Genie and Python for devices: wheels, the QAIRT SDK, and folders of the user's.

The SDK's layout is that of the vendor's public documents: `lib/<platform>/` and `bin/<platform>/`
of the tutorial for Genie on Android (80-63442-10, `no_lora.html`) and of genie-t2t-run's sample
code, `lib/hexagon-v<arch>/unsigned/` of the former and of "Backend" (`QNN/general/backend.html`).

Android has no Python; Termux's packages and the official builds for Android (PEP 738) are prefixes
with `bin`, `lib` and the standard library. A run folder gets the prefix, and before it a `python3`
on the path of its processes, which sets what an interpreter needs that lies elsewhere than it was
built for.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from buildlib.elf import is_elf, read_elf
from buildlib.errors import InputFileError
from buildlib.paths import default_cache_root
from buildlib.targets import Soc
from harness.deploy.deployment import DeployFile
from harness.errors import GenieMissingError, WrongUseError
from harness.runtimes.bundles.bundle import Bundle

FOLDERS_VARIABLE = "QNNFARM_LIBRARIES"
"""Environment variable: folders, separated as in `PATH`, with libraries in `FOLDER/<ABI>`."""
ANDROID, BOARD, EMULATOR = "arm64-v8a", "aarch64", "x86_64"
PLATFORMS: Mapping[str, str] = MappingProxyType(
    {ANDROID: "aarch64-android", BOARD: "aarch64-oe-linux-gcc11.2"}
)
"""The SDK's platform for each ABI."""
PROGRAMS = ("genie-t2t-run", "genie-app")
"""The SDK's runners; a device that runs others of the same flags has Python."""
_ENCODER = "genie-t2e-run"  # older SDKs have none
SDK_PROGRAMS = (*PROGRAMS, _ENCODER)
_GENIE = ("libGenie.so", "libQnnHtpNetRunExtensions.so")
_SET_SDK = "set QAIRT_SDK_ROOT to an unpacked QAIRT SDK"


def qnn_libraries(abi: str, soc: Soc) -> tuple[str, ...]:
    """Return the libraries that a context binary needs, as in the vendor's tutorial for Android.

    >>> from buildlib.targets import find_soc
    >>> qnn_libraries("arm64-v8a", find_soc("SM8750"))[-2:]
    ('libQnnHtpV79Stub.so', 'libQnnHtpV79Skel.so')
    """
    libraries = ("libQnnHtp.so", "libQnnSystem.so")
    if abi == EMULATOR:
        return libraries
    dsp = f"libQnnHtpV{soc.htp_arch}"
    return (*libraries, "libQnnHtpPrepare.so", f"{dsp}Stub.so", f"{dsp}Skel.so")


def profiling_readers(soc: Soc) -> tuple[str, ...]:
    """Return the libraries that read QNN's profiles on a device, which not every source has."""
    readers = ("libQnnHtpProfilingReader.so", "libQnnHtpOptraceProfilingReader.so")
    return (*readers, f"libQnnHtpV{soc.htp_arch}CalculatorStub.so")


@dataclass(frozen=True, slots=True)
class LibrarySource:
    """Folders with libraries for devices of one ABI.

    Attributes:
        origin: its name, with its version.
        folders: searched in their order; the libraries of every Hexagon architecture may be there.
        advice: for users where it lacks something.
        programs: folders with the SDK's runners; none where devices have Python.
    """

    origin: str
    folders: tuple[Path, ...]
    advice: str = ""
    programs: tuple[Path, ...] = ()

    def find(self, abi: str, soc: Soc, *, genie: bool) -> Bundle:
        """Return the libraries for a SoC, with dependencies and readers of profiles."""
        needed = (*(_GENIE if genie else ()), *qnn_libraries(abi, soc))
        files = _find_files((*needed, *profiling_readers(soc)), self.folders)
        _add_dependencies(files, self.folders)
        programs = _find_files(SDK_PROGRAMS, self.programs) if genie else {}
        required = (*needed, *(PROGRAMS if genie and abi == ANDROID else ()))
        gaps = [name for name in required if name not in {**files, **programs}]
        if gaps:
            more = f" and {len(gaps) - 3} more files" if len(gaps) > 3 else ""
            lacks = f"{self.origin} lacks {', '.join(gaps[:3])}{more}"
            raise GenieMissingError(soc.name, f"{lacks}{self.advice and f': {self.advice}'}")
        bundled_files = {name: DeployFile(path, origin=self.origin) for name, path in files.items()}
        for name, path in programs.items():
            bundled_files[name] = DeployFile(path, executable=True, origin=self.origin)
        return Bundle(abi, soc, bundled_files)


def _find_files(names: Sequence[str], folders: Sequence[Path]) -> dict[str, Path]:
    paths = {name: [folder / name for folder in folders] for name in names}
    matches = ((name, next(filter(Path.is_file, at), None)) for name, at in paths.items())
    return {name: path for name, path in matches if path is not None}


def _add_dependencies(files: dict[str, Path], folders: Sequence[Path]) -> None:
    """Add the libraries of the folders that the files need, such as their C++ runtime."""
    unread = list(files.values())
    while unread:
        path = unread.pop()
        with contextlib.suppress(InputFileError):  # a damaged library is told of by the check
            needed = read_elf(path, exports=False).needed if is_elf(path) else ()
            names = [name for name in needed if name not in files and Path(name).name == name]
            more = _find_files(names, folders)
            files |= more
            unread += more.values()


def fetched_wheel(version: str) -> Path:
    """Return the folder for the libraries of a version of the wheel for Linux boards."""
    from buildlib.toolchains.ort_qnn.wheel import DISTRIBUTION

    return default_cache_root() / "libraries" / f"{DISTRIBUTION}-{version}-{BOARD}"


def sdk_source(root: Path, abi: str, soc: Soc) -> LibrarySource:
    """Return the folders of an unpacked SDK for a SoC; its runners are used on Android."""
    platform = PLATFORMS[abi]
    folders = (root / "lib" / platform, root / "lib" / f"hexagon-{soc.dsp_arch}" / "unsigned")
    programs = (root / "bin" / platform,) if abi == ANDROID else ()
    return LibrarySource(f"QAIRT SDK {root.resolve().name}", folders, f"look into {root}", programs)


def _sources(abi: str, soc: Soc, environment: Mapping[str, str]) -> Iterator[LibrarySource]:
    """Return the sources for an ABI, best first.

    A board takes the wheel of the compiler's version before the SDK, since a context binary may be
    read by a runtime that is as new as its compiler, and not by an older one.
    """
    roots = [folder for folder in environment.get(FOLDERS_VARIABLE, "").split(os.pathsep) if folder]
    folders = tuple(Path(folder).expanduser() / abi for folder in roots)
    if any(map(Path.is_dir, folders)):
        advice = f"{FOLDERS_VARIABLE} names folders with files for this ABI in FOLDER/{abi}"
        yield LibrarySource(os.pathsep.join(map(str, folders)), folders, advice, folders)
    from buildlib.toolchains.base import host_fault
    from buildlib.toolchains.ort_qnn.wheel import DISTRIBUTION, find_libraries
    from buildlib.toolchains.registry import sdk_root

    if abi == EMULATOR:
        wheel = find_libraries()
        origin = f"{DISTRIBUTION} {wheel.version}"
        yield LibrarySource(origin, (wheel.folder, wheel.support_folder))
    if abi == BOARD and not host_fault():
        version = find_libraries().version
        folder = fetched_wheel(version)
        if folder.is_dir():
            advice = f"remove {folder}, then `qnnfarm libraries fetch` gets it anew"
            yield LibrarySource(f"{DISTRIBUTION} {version} for {BOARD}", (folder,), advice)
    root = sdk_root(environment)
    if abi in PLATFORMS and root is not None:
        yield sdk_source(root, abi, soc)


def find_genie(abi: str, soc: Soc, environment: Mapping[str, str] = os.environ) -> Bundle:
    """Find Genie and QNN for devices of an ABI, in the first source that there is.

    Args:
        abi: as the device calls it; Linux says `aarch64` where Android says `arm64-v8a`.

    Raises:
        GenieMissingError: they are not on this machine; says how to get them.
        ToolchainMissingError: the wheel that compiles is not installed.
    """
    return _find(abi, soc, environment, genie=True)


def find_qnn(abi: str, soc: Soc, environment: Mapping[str, str] = os.environ) -> Bundle:
    """Find QNN alone, without Genie and its programs; see `find_genie`."""
    return _find(abi, soc, environment, genie=False)


def _find(abi: str, soc: Soc, environment: Mapping[str, str], *, genie: bool) -> Bundle:
    for source in _sources(abi, soc, environment):
        return source.find(abi, soc, genie=genie)
    match abi:
        case "aarch64":
            advice = f"`qnnfarm libraries fetch` gets it from PyPI; or {_SET_SDK}"
        case "arm64-v8a":
            advice = f"it comes with the QAIRT SDK: {_SET_SDK}, or {FOLDERS_VARIABLE} to folders"
        case _:
            advice = "there is none for that ABI"
    raise GenieMissingError(soc.name, f"for {abi or 'no known ABI'}, {advice}")


VARIABLE = "QNNFARM_PYTHON"
"""Environment variable: a folder with a prefix in `FOLDER/<ABI>`."""
NAMED = f"{VARIABLE} names a folder with one, as docs/first-phone.md says"
_PREFIX = "python"
_LAUNCHER = "python3"
_PROGRAM = "bin/python3"
_LEFT_OUT = frozenset({"__pycache__", "test", "tests", "include", "share", "site-packages"})
_MOST_FILES = 5000


def find_python(abi: str, environment: Mapping[str, str] = os.environ) -> dict[str, DeployFile]:
    """Return the files of the user's Python for an ABI, by their names in a run folder.

    Returns:
        None of them where `QNNFARM_PYTHON` is not set, or has no folder for the ABI.
    """
    prefixes = environment.get(VARIABLE, "")
    folder = Path(prefixes).expanduser() / abi
    if not prefixes or not folder.is_dir():
        return {}
    if not (folder / _PROGRAM).is_file():
        raise WrongUseError(f"{VARIABLE}: {folder} has no {_PROGRAM}: name a Python's prefix")
    launcher = Path(str(resources.files("device_scripts") / "python3.sh"))
    files = {_LAUNCHER: DeployFile(launcher, executable=True, origin="qnnfarm")}
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        runs = name == _PROGRAM
        files[f"{_PREFIX}/{name}"] = DeployFile(path, executable=runs, origin=str(folder))
        if len(files) > _MOST_FILES:
            reason = f"has more than {_MOST_FILES} files: leave what no runner imports out"
            raise WrongUseError(f"{VARIABLE}: {folder} {reason}")
    return files


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a prefix that running needs: its program, libraries and modules."""
    yield folder / _PROGRAM
    for top, below, names in os.walk(folder / "lib"):
        below[:] = sorted(set(below) - _LEFT_OUT)
        for name in sorted(names):
            if not name.endswith((".a", ".pyc")):
                yield Path(top) / name
