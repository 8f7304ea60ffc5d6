"""Libraries of the installed `onnxruntime-qnn` wheel.

Nothing is imported or loaded here: the folder is found through its import specification, which is
cheap and works where the libraries do not load.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from buildlib.errors import ToolchainMissingError
from buildlib.toolchains.base import host_fault

TOOLCHAIN = "ort-qnn"
DISTRIBUTION = "onnxruntime-qnn"
_PACKAGE = "onnxruntime_qnn"

_COMPILER = ("libQnnHtp.so", "libQnnSystem.so", "libQnnIr.so", "libonnxruntime_providers_qnn.so")
_RUNTIME = ("libGenie.so", "libQnnHtp.so", "libQnnSystem.so")
_EXTENSIONS = "libQnnHtpNetRunExtensions.so"


@dataclass(frozen=True, slots=True)
class WheelLibraries:
    """The libraries of one installed wheel.

    Attributes:
        folder: QNN and Genie.
        support_folder: the C++ runtime that the wheel brings for them.
    """

    folder: Path
    support_folder: Path

    @property
    def version(self) -> str:
        """Version of the wheel."""
        from importlib.metadata import version  # takes longer than all else in some children

        return version(DISTRIBUTION)

    @property
    def htp(self) -> Path:
        """Offline compiler and emulator in one."""
        return self.folder / "libQnnHtp.so"

    @property
    def system(self) -> Path:
        """Reader of DLCs and context binaries."""
        return self.folder / "libQnnSystem.so"

    @property
    def ir(self) -> Path:
        """Writer of DLCs."""
        return self.folder / "libQnnIr.so"

    @property
    def genie(self) -> Path:
        """The Genie runtime."""
        return self.folder / "libGenie.so"

    @property
    def extensions(self) -> Path:
        """Reader of files of backend extensions."""
        return self.folder / _EXTENSIONS

    @property
    def search_path(self) -> str:
        """`LD_LIBRARY_PATH` under which these libraries find each other."""
        return f"{self.folder}:{self.support_folder}"


def find_libraries() -> WheelLibraries:
    """Find the installed wheel's libraries.

    Raises:
        ToolchainMissingError: not Linux on x86_64, no wheel, or a wheel without its libraries.
    """
    if fault := host_fault():
        raise ToolchainMissingError(TOOLCHAIN, fault)
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainMissingError(
            TOOLCHAIN, f"{DISTRIBUTION} is not installed: pip install 'qnnfarm[build]'"
        )
    folder = Path(next(iter(spec.submodule_search_locations))).resolve()
    absent = [
        name for name in (*_COMPILER, *_RUNTIME, _EXTENSIONS) if not (folder / name).is_file()
    ]
    support = folder.parent / f"{_PACKAGE}.libs"
    if not support.is_dir():
        absent.append(support.name)
    if absent:
        reason = f"{folder} lacks {', '.join(dict.fromkeys(absent))}; reinstall {DISTRIBUTION}"
        raise ToolchainMissingError(TOOLCHAIN, reason)
    return WheelLibraries(folder, support)
