"""The bar of a deployment, on a terminal and elsewhere."""

import io
import os
import pty
import re
import threading
from pathlib import Path

import pytest

from buildlib.progress import tell, working
from harness import console
from harness.cli import progress
from harness.cli.device_lease import deploy_progress
from harness.devices.device import Device
from tests.command_line import start

_ESC = "\x1b"


def _shown(monkeypatch: pytest.MonkeyPatch, steps: list[int], *, terminal: bool = True) -> str:
    screen = io.StringIO()
    made = console.PlainConsole(file=screen, force_terminal=terminal, width=120)
    monkeypatch.setattr(console, "remarks", lambda: made)
    with deploy_progress(f"[red]serial{_ESC}[2J") as on_progress:
        for sent in steps:
            on_progress(sent << 20, 4 << 20)
    return screen.getvalue()


def test_bytes_and_device_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _shown(monkeypatch, [1, 4])
    assert "4.0/4.0 MiB" in shown
    assert "hashing on [red]serial\u241b[2J" in shown
    assert f"serial{_ESC}" not in shown
    assert "serial" not in _shown(monkeypatch, [])  # nothing is pushed
    assert not _shown(monkeypatch, [1, 4], terminal=False).strip()  # no bar in a file


def _on_a_terminal(*arguments: str | Path) -> str:
    """What a command shows where stderr is a terminal."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                shown.extend(os.read(ours, 4096))
            except OSError:  # the last end at the other side is closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    variables = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    try:
        with Path(os.devnull).open("wb") as nothing, open(theirs, "wb", closefd=False) as terminal:
            streams = (nothing, terminal)
            process = start([*map(str, arguments)], cwd=Path.cwd(), env=variables, streams=streams)
            process.join(280)
            assert process.exitcode == 0
    finally:
        os.close(theirs)
        reader.join(200)
        os.close(ours)
    return shown.decode(errors="replace")


def test_a_command_shows_what_it_pushes_and_only_that(
    virtual_device: Device, small_bundle: Path, tmp_path: Path
) -> None:
    serial, notes = virtual_device.serial, tmp_path / "notes.txt"
    notes.write_text(f"of {notes}")  # no other test has pushed it
    query = ("generate", small_bundle, "--prompt", "In", "--max-tokens", "1", "--push", notes)
    bar = re.compile(f"(push to|hashing on) {re.escape(serial)}")  # the last where little is pushed
    assert bar.search(_on_a_terminal(*query, "--device", serial))
    assert not bar.search(_on_a_terminal(*query, "--device", serial))


def test_a_long_stage_is_told_of_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, told = io.StringIO(), threading.Event()
    made = console.PlainConsole(file=screen)
    monkeypatch.setattr(console, "remarks", lambda: made)
    monkeypatch.setattr(progress, "_TELL_S", 0.1)
    bar = progress.BuildBar("SM8750")
    printed = bar.print

    def show(line: str) -> None:
        printed(line)
        told.set()

    monkeypatch.setattr(bar, "print", show)
    with bar, working("export my-model"):
        tell("layer 3/24, window 2/8")
        assert told.wait(200)
    (line, *_) = screen.getvalue().splitlines()
    found = re.fullmatch(r"SM8750: export my-model: still running, (\d+) s, (.*)", line)
    assert found is not None, line
    assert found[2] == "layer 3/24, window 2/8"
