"""The QAIRT SDK: its folder on this host, and its name for options that only it compiles.

Its converter and compiler are the second `Toolchain`, beside `ort_qnn`; it is not implemented yet.
The SDK's Genie for devices is found by it already, and options that need its compiler are refused
by name.
"""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT_VARIABLES = ("QAIRT_SDK_ROOT", "QNN_SDK_ROOT")
"""Environment variables that name an unpacked SDK; the first that is set counts."""

COMPILER = "the QAIRT SDK's toolchain"
"""Its name in messages."""


def sdk_root(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the SDK, or None where no variable names one."""
    root = next((environment[name] for name in ROOT_VARIABLES if environment.get(name)), None)
    return None if root is None else Path(root)
