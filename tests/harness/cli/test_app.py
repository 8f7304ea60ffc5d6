"""The way out of the command line."""

import subprocess
import sys

import pytest

_LOST = """
import signal
from harness.cli import app

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def command_line():
    def run(**_):
        Finalized()
        {end}
    return run

app.command_line = command_line
app.main()
"""


@pytest.mark.parametrize("end", ["return", "raise SystemExit(0)", "raise OSError('in a clean-up')"])
def test_an_interrupt_that_got_lost_shows_in_the_exit_code(end: str) -> None:
    code = _LOST.format(end=end)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 130, done.stderr
