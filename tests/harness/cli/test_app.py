"""The way out of the command line, and its help."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.cli import app
from harness.errors import INTERRUPTED, NO_ANSWER
from tests.harness.cli.conftest import Run

Main = Callable[[Callable[..., object]], object]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Main]:
    """Runs `main` with another command line, and returns its exit code."""

    def run(command: Callable[..., object]) -> object:
        monkeypatch.setattr(app, "command_line", lambda: command)
        with pytest.raises(SystemExit) as end:
            app.main()
        return end.value.code

    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("end", [None, SystemExit(0), OSError("in a clean-up")], ids=repr)
def test_an_interrupt_that_got_lost_shows_in_the_exit_code(
    main: Main, end: BaseException | None
) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def command(**_: object) -> None:
        Finalized()
        if end is not None:
            raise end

    assert main(command) == INTERRUPTED


def test_a_bug_is_no_answer(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(lambda **_: 1 / 0) == NO_ANSWER
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_what_only_builds_need_is_named_with_its_extra(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(**_: object) -> None:
        raise ModuleNotFoundError("No module named 'onnx.helper'", name="onnx.helper")

    assert main(command) == NO_ANSWER
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("needs onnx.helper, which is not installed: pip install 'qnnfarm[build]'")


def test_a_group_without_a_command_shows_its_help(qnnfarm: Run) -> None:
    done = qnnfarm("pool")
    assert done.returncode == 2
    assert "unquarantine" in done.stdout + done.stderr
    assert "qnnfarm: " not in done.stderr


@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_nothing_is_writable_by_everybody(
    main: Main, tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        main(lambda **_: (tmp_path / "made").touch())
    finally:
        os.umask(before)
    assert (tmp_path / "made").stat().st_mode & 0o777 == mode
