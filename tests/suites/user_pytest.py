"""A user's run of pytest on the suites, outside the checkout."""

import os
import subprocess
import sys
from pathlib import Path

PYTHON = os.environ.get("QNNFARM_TEST_PYTHON", sys.executable)
"""The interpreter whose qnnfarm is run: this one, or that of an installed wheel."""


def run_pytest(folder: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run pytest with the plugin in `folder`; `-n` works, other plugins are left out."""
    command = [
        PYTHON, "-m", "pytest", "--disable-plugin-autoload", "-p", "xdist",
        "-p", "harness.pytest_plugin", "-p", "no:cacheprovider", f"--rootdir={folder}",
        "-W", "error", *map(str, arguments),
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=folder, env=os.environ.copy(), timeout=1700, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
