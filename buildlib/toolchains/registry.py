"""Toolchains by the names that users give."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from buildlib.errors import InvalidOptionError
from buildlib.toolchains.qairt.sdk import TOOLCHAIN, QairtSdk

if TYPE_CHECKING:
    from buildlib.toolchains.base import Toolchain

ToolchainName = Literal["pypi", "qairt"]


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
        ToolchainMissingError: there is no SDK, or it is not usable.
    """
    match name:
        case "pypi":
            if sdk is not None:
                reason = "it is the folder of the QAIRT SDK; add `--toolchain qairt`"
                raise InvalidOptionError("qairt_sdk", reason, ())
            from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

            return OrtQnnToolchain(log_dir)
        case "qairt":
            from buildlib.toolchains.qairt.toolchain import QairtToolchain

            return QairtToolchain(QairtSdk.find(sdk), log_dir)
        case _:
            reason = f"there is no toolchain {name!r}"
            raise InvalidOptionError("toolchain", reason, get_args(ToolchainName))


def toolchain_of(versions: Mapping[str, str]) -> "Toolchain":
    """Return the toolchain that made something, by the versions that it left there.

    Raises:
        ToolchainMissingError: it is the SDK's, and there is none here, or not usable.
    """
    return open_toolchain("qairt" if versions.get("toolchain") == TOOLCHAIN else "pypi")
