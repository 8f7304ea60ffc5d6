"""A fresh clone: what sets it up asks first, and what needs it says so."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import test as set_up

ROOT = Path(__file__).parents[1]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """A user with sudo on a terminal; gives the commands that would be run."""
    ran: list[Sequence[str]] = []

    def run(command: Sequence[str], **_: Any) -> "subprocess.CompletedProcess[str]":  # noqa: ANN401
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(set_up, "_is_terminal", lambda: True)
    return ran


@pytest.mark.parametrize("answer", ["", "no"])
def test_nothing_is_installed_unless_the_user_agrees(
    commands: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: answer)
    assert not set_up._install(["mksh"])
    assert commands == []


def test_packages_are_named_before_sudo_installs_them(
    commands: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "Y")
    assert set_up._install(["mksh", "adb"])
    assert "mksh adb" in capsys.readouterr().out
    assert all(command[0] == "/usr/bin/sudo" for command in commands)
    assert commands[-1][-2:] == ["mksh", "adb"]


def test_make_names_the_command_that_sets_a_clone_up() -> None:
    command = ["make", "-C", str(ROOT), "check", "PYTHON=nowhere/python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no nowhere/python: `make setup` makes it" in done.stderr
