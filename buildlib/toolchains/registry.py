"""Toolchains by the names that users give, and the folder of the QAIRT SDK.

A package has one at the door `qnnfarm.toolchains`: a module as `ToolchainModule`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from buildlib.entry_points import load_entry
from buildlib.errors import InvalidOptionError, ToolchainMissingError

if TYPE_CHECKING:
    from buildlib.toolchains.base import Toolchain

DOOR = "toolchains"
ToolchainName = Literal["pypi", "qairt"]
ROOT_VARIABLES = ("QAIRT_SDK_ROOT", "QNN_SDK_ROOT")
"""Environment variables that name an unpacked SDK; the first that is set counts."""
INSTALL_FOLDER = Path("/opt/qcom/aistack/qairt")
"""Its folders are the versions of the SDK that are installed for all users.

Source: the install guide of ai-hub-apps, `tutorials/llm_on_genie`.
"""
SDK_VERSION = re.compile(r"\d+\.\d+\.\d+(\.\d+)?")


class ToolchainModule(Protocol):
    """A module with a toolchain."""

    def open_toolchain(self, sdk: Path | None, log_dir: Path | None) -> "Toolchain":
        """See `open_toolchain` here."""

    def examine_host(self) -> tuple[Literal["ok", "note", "broken"], str, str] | None:
        """Tell whether this host can run it, with advice; None if it never can."""


def open_toolchain(
    name: str = "pypi", sdk: Path | None = None, log_dir: Path | None = None
) -> "Toolchain":
    """Return a toolchain: the compiler of PyPI's wheel, or that of an unpacked QAIRT SDK.

    Args:
        sdk: folder of the SDK; by default of `QAIRT_SDK_ROOT` or `QNN_SDK_ROOT`, else the newest
            that is installed.
        log_dir: keeps the log of every step.

    Raises:
        InvalidOptionError: there is none of that name, or an SDK for one that takes none.
        ToolchainMissingError: no package has it; there is no SDK, or it is not usable.
    """
    match name:
        case "pypi":
            if sdk is not None:
                reason = "it is the folder of the QAIRT SDK; add `--toolchain qairt`"
                raise InvalidOptionError("qairt_sdk", reason, ())
            from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

            return OrtQnnToolchain(log_dir)
        case "qairt":
            module: ToolchainModule | None = load_entry(DOOR, name)
            if module is None:
                reason = "it comes with plugins/qairt, which is not here"
                raise ToolchainMissingError(name, reason)
            return module.open_toolchain(sdk, log_dir)
        case _:
            reason = f"there is no toolchain {name!r}"
            raise InvalidOptionError("toolchain", reason, get_args(ToolchainName))


def toolchain_of(versions: Mapping[str, str]) -> "Toolchain":
    """Return the toolchain that made something, by the versions that it left there.

    Raises:
        ToolchainMissingError: it is the SDK's, and there is none here, or not usable.
    """
    return open_toolchain("qairt" if versions.get("toolchain") == "qairt" else "pypi")


def sdk_root(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the SDK: of a variable, else the newest that is installed, if any."""
    root = next((environment[name] for name in ROOT_VARIABLES if environment.get(name)), None)
    if root is not None:
        return Path(root)
    folders = INSTALL_FOLDER.iterdir() if INSTALL_FOLDER.is_dir() else ()
    versions = [path for path in folders if SDK_VERSION.fullmatch(path.name) and path.is_dir()]
    return max(versions, key=lambda path: [int(n) for n in path.name.split(".")], default=None)
