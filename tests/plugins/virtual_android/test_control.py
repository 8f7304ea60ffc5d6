"""Peers of the control socket: the user, processes of the device, garbage."""

import asyncio
import json
import os
import shlex
import socket
import stat
from pathlib import Path

import pytest

from harness.errors import VirtualDeviceError
from plugins.virtual_android import manager
from plugins.virtual_android.control import ask, open_control, serve_control
from plugins.virtual_android.faults import parse_fault
from plugins.virtual_android.manager import VirtualDevice
from tests.plugins.virtual_android.helpers import Adb

_STEAL = """
import os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.settimeout(200)
try:
    os.chdir(sys.argv[1])
    s.connect("control.sock")
    s.sendall(b'{"do": "inject", "faults": ["stall"]}\\n')
    print("got", s.recv(100))
except (ConnectionResetError, BrokenPipeError, FileNotFoundError):
    print("got", b"")
"""


def test_the_socket_is_the_users_alone(device: VirtualDevice) -> None:
    folder = device.root.parent
    assert stat.S_IMODE((folder / "control.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "events.jsonl").stat().st_mode) == 0o600


def test_processes_on_the_device_are_refused(device: VirtualDevice, on_device: Adb) -> None:
    folder = shlex.quote(str(device.root.parent))
    code = shlex.quote(_STEAL)
    steal = f"python3 -c {code} {folder} >$TMPDIR/got 2>&1 </dev/null"
    on_device("shell", f"setsid sh -c {shlex.quote(steal)} & sleep 0.1")
    wait = "until [ -s $TMPDIR/got ]; do sleep 0.1; done; cat $TMPDIR/got; rm $TMPDIR/got"
    assert on_device("shell", wait).stdout == b"got b''\n"
    assert manager.control(device.name).faults() == ()


def test_a_long_path_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(deep))
    monkeypatch.setenv("HOME", str(tmp_path))
    manager.start("deep", "SM8750", faults=[parse_fault("stall:when=pull")])
    try:
        assert manager.control("deep").faults() == (parse_fault("stall:when=pull"),)
        manager.control("deep").clear()
        kinds = [(event.kind, event.fault) for event in manager.control("deep").events()]
        assert kinds == [
            ("booted", ""),
            ("armed", "stall:when=pull"),
            ("cleared", "stall:when=pull"),
        ]
        lines = (deep / "devices/deep/events.jsonl").read_text().splitlines()
        assert [json.loads(line)["kind"] for line in lines] == ["booted", "armed", "cleared"]
    finally:
        manager.remove("deep")


def test_a_socket_that_nobody_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("control.sock")
    with pytest.raises(VirtualDeviceError, match="does not run"):
        ask("gone", tmp_path, {"do": "faults"})


def test_a_server_starts_when_the_number_of_its_folder_is_another_file(tmp_path: Path) -> None:
    """The socket was bound below `/proc/self/fd`, where Python 3.13 looks for its file."""
    listener = open_control(tmp_path)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]

    async def serve() -> None:
        server = await serve_control(listener, lambda _: {})
        server.close()

    try:
        asyncio.run(serve())
    finally:
        for descriptor in taken:
            os.close(descriptor)
