"""The way out of the command line."""

import re
import signal
import subprocess
import sys

import pytest

from harness.cli.app import main

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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["bnech"], "no such command 'bnech': did you mean 'bench'? `qnnfarm -h` shows"),
        (["pool", "show", "--pol", "x"],
         "no such option: --pol: did you mean --pool? `qnnfarm pool show -h` shows"),
        (["bench"], "missing argument 'CONTAINER_DIR'; `qnnfarm bench -h` shows"),
        (["bench", ".", "--db", "x", "--wait", "soon"],
         "invalid value for '--wait': must be a number, not 'soon'; `qnnfarm"),
        (["bench", ".", "--db", "x", "--sessions", "0"],
         "invalid value for '--sessions': must be at least 1, not '0'"),
        (["bench", ".", "--db", "x", "--\x1b[31m\n"], "no such option: --"),
        (["bench", ".", "--max-warmup", "-1"], "--max-warmup: must be at least 0, not -1"),
        (["bench", ".", "-d", "64", "-p", "2"], "--prompt-tokens: after a depth"),
        (["evaluate", ".", "suites/tasks", "--max-tokens", "9", "--system", "x"],
         "--system is the system message of a chat: give --chat, too"),
        (["embed", ".", "x", "--min-cosine", "0"], "--min-cosine is the cosine with float"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line(
    words: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _exit_code(words, monkeypatch) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith(f"qnnfarm: {line}")
    assert said.err.count("\n") == 1
    assert said.err.strip().isprintable()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["build", "-h"], "{MODEL_DIR}"),
        (["generate", "-h"], "error|warn|info|verbose"),
        (["bench", "-h"], "{CONTAINER_DIR}..."),
        (["pool", "show", "-h"], "PATH"),
        (["-h"], "--help"),
    ],
)
def test_help_names_no_type_of_python(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert _exit_code(words, monkeypatch) == 0
    shown = capsys.readouterr().out
    assert told in shown
    assert not re.search(r"<\w|bool|list\[", shown)


def test_a_group_without_a_command_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(["pool"], monkeypatch) == 2
    said = capsys.readouterr()
    assert "unquarantine" in said.out + said.err
    assert "qnnfarm: " not in said.err


def _exit_code(words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["qnnfarm", *words])
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    return left.value.code
