"""An unpacked QAIRT SDK: its folder, its files, and its release.

Sources, all public: the layout and the variable from "Linux setup" (docs.qualcomm.com 80-63442-10)
and ExecuTorch's `backends/qualcomm/README.md`; the programs from "Tools" (80-63442-2, 80-63442-10).
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from buildlib.errors import ToolchainMissingError
from buildlib.toolchains.base import host_fault
from buildlib.toolchains.registry import ROOT_VARIABLES, SDK_VERSION, sdk_root

TOOLCHAIN = "qairt"
PYTHON_VARIABLE = "QNNFARM_QAIRT_PYTHON"
"""Environment variable: the Python with the packages that the SDK's converters need."""
WHERE = (
    "get the Qualcomm AI Runtime SDK from softwarecenter.qualcomm.com, unpack it and set "
    f"{ROOT_VARIABLES[0]}"
)
OLDEST = (2, 29)
"""The first release whose Genie the vendor's tutorial (ai-hub-apps, `llm_on_genie`) takes."""

_HOST = "x86_64-linux-clang"
_YAML_VERSION = re.compile(r"^version:\s*['\"]?v?([\d.]+)", re.MULTILINE)
_MAX_YAML_BYTES = 1 << 16

CONVERTER, QUANTIZER = "qairt-converter", "qairt-quantizer"
GENERATOR, UTILITY = "qnn-context-binary-generator", "qnn-context-binary-utility"
_PROGRAMS = (CONVERTER, QUANTIZER, GENERATOR, UTILITY)
_LIBRARIES = ("libQnnHtp.so", "libQnnModelDlc.so", "libQnnHtpNetRunExtensions.so")


@dataclass(frozen=True, slots=True)
class QairtSdk:
    """An unpacked SDK.

    Attributes:
        version: of the release, such as `2.39.0.250926`.
    """

    root: Path
    version: str

    @classmethod
    def find(cls, root: Path | None = None, environment: Mapping[str, str] = os.environ) -> Self:
        """Return the SDK in a folder; by default the one that `sdk_root` names.

        Raises:
            ToolchainMissingError: there is none, it is not whole or too old, or this host cannot
                run its programs; says where to get it.
        """
        if fault := host_fault():
            raise ToolchainMissingError(TOOLCHAIN, fault)
        folder = root or sdk_root(environment)
        if folder is None:
            raise ToolchainMissingError(TOOLCHAIN, f"there is no SDK here; {WHERE}")
        if not folder.is_dir():
            raise ToolchainMissingError(TOOLCHAIN, f"{folder} is no folder; {WHERE}")
        sdk = cls(folder.resolve(), _version(folder.resolve()))
        if absent := sdk.missing():
            more = f" and {len(absent) - 2} more files" if len(absent) > 2 else ""
            lacks = f"{folder} lacks {', '.join(absent[:2])}{more}"
            raise ToolchainMissingError(TOOLCHAIN, f"{lacks}; unpack the SDK again")
        if not sdk.version:
            reason = f"{folder} has no sdk.yaml with a version, and its name is none"
            raise ToolchainMissingError(TOOLCHAIN, f"{reason}; unpack the SDK again")
        if sdk.release < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            reason = f"{folder} is release {sdk.version}, and {oldest} is the oldest that works"
            raise ToolchainMissingError(TOOLCHAIN, f"{reason}; {WHERE}")
        return sdk

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor number of the version."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    def program(self, name: str) -> Path:
        """Return the path of a program for this host."""
        return self.root / "bin" / _HOST / name

    def library(self, name: str) -> Path:
        """Return the path of a library for this host."""
        return self.root / "lib" / _HOST / name

    def missing(self) -> list[str]:
        """Return the files that compiling needs and that are not there, relative to the root."""
        needed = [*map(self.program, _PROGRAMS), *map(self.library, _LIBRARIES)]
        return [str(path.relative_to(self.root)) for path in needed if not path.is_file()]

    def environment(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment of the SDK's programs, as its `envsetup.sh` is documented."""
        programs, path = self.root / "bin" / _HOST, environment.get("PATH", os.defpath)
        return {
            **environment,
            "QNN_SDK_ROOT": str(self.root),
            "QAIRT_SDK_ROOT": str(self.root),
            "PATH": f"{programs}{os.pathsep}{path}",
            "LD_LIBRARY_PATH": str(self.root / "lib" / _HOST),
            "PYTHONPATH": str(self.root / "lib" / "python"),
        }

    def command(self, name: str, environment: Mapping[str, str] = os.environ) -> list[str]:
        """Return how a program starts: scripts under the Python that `PYTHON_VARIABLE` names."""
        path, python = self.program(name), environment.get(PYTHON_VARIABLE)
        with path.open("rb") as file:
            script = b"python" in file.readline(200) if file.read(2) == b"#!" else False
        return [python, str(path)] if python and script else [str(path)]


def _version(root: Path) -> str:
    """Return the version in `sdk.yaml`, else that of the folder's name, else nothing."""
    try:
        with (root / "sdk.yaml").open(encoding="utf-8", errors="replace") as file:
            match = _YAML_VERSION.search(file.read(_MAX_YAML_BYTES))
    except OSError:
        match = None
    version = match[1] if match else root.name
    return version if SDK_VERSION.fullmatch(version) else ""
