"""Genie validator: `GenieDialogConfig_createFromJson`, or that of embeddings, in a child process.

Genie checks the text against its own schema and opens no file, so this needs neither the binaries
nor a device.
"""

import re
from pathlib import Path

from buildlib.container.layout import GENIE_CONFIG
from buildlib.errors import GenieConfigError
from buildlib.toolchains.child_process import Step, run_step
from buildlib.toolchains.ort_qnn.wheel import find_libraries

_WORKER = "buildlib.container.genie_validator_worker"
_TIMEOUT_S = 60.0
_SAYS_NOTHING = re.compile(
    r"at least one subschema has failed, but all of them are required to validate( - )?"
)
_HEADINGS = ("Failed to validate", "# LIBNATIVE", "Error:")


def check_genie_config(folder: Path, *, timeout_s: float = _TIMEOUT_S) -> None:
    """Let Genie validate the `genie_config.json` in a folder.

    Raises:
        GenieConfigError: Genie refuses it; the message is Genie's, shortened.
        ToolchainMissingError: there is no Genie on this machine.
        ToolchainError: Genie died of it.
    """
    path = folder / GENIE_CONFIG
    try:
        text = path.read_bytes()
    except OSError as error:
        raise GenieConfigError(str(path), error.strerror or str(error)) from error
    check_genie_text(text, str(path), timeout_s=timeout_s)


def check_genie_text(text: bytes, path: str, *, timeout_s: float = _TIMEOUT_S) -> None:
    """Let Genie validate a text; errors call it `path`."""
    step = Step(_WORKER, "validate", Path(path), timeout_s, find_libraries().search_path)
    verdict = run_step(step, text)
    if verdict["status"] != 0:
        raise GenieConfigError(path, _shorten(verdict["said"]) or f"status {verdict['status']}")


def _shorten(said: str) -> str:
    """Return Genie's message as one line."""
    lines = (_SAYS_NOTHING.sub("", line).strip().removeprefix("- ") for line in said.splitlines())
    return "; ".join(line for line in lines if line and not line.startswith(_HEADINGS))[:1000]
