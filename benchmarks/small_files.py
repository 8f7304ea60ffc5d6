"""Many small files beside what the protocol allows: `python -m benchmarks.small_files`.

The same files go to a device and back with the `adb` program and with `push_many` and `pull_many`,
by turns with a virtual device and with a daemon that answers every request from memory. The second
is what the adb protocol, server and client cost by themselves; no device is faster. `adb pull` asks
for a file when it has the one before, so its floor is a round trip through the adb server.
"""

import argparse
import contextlib
import itertools
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Self

from tests.private_adb import private_adb

if TYPE_CHECKING:
    from harness.devices.device import Device

SOC = "SM8750"
LEAST_FILES_PER_S = 1000
FOLDER = "/data/local/tmp/many"
ACTS = ("adb push", "push_many", "adb pull", "pull_many")

_FEATURES = b"shell_v2,stat_v2,ls_v2,sendrecv_v2,fixed_push_mkdir"
_BANNER = b"device::ro.product.name=memory;features=" + _FEATURES
_HEADER = struct.Struct("<6I")
_REQUEST = struct.Struct("<4sI")
_STAT = struct.Struct("<4sIQQIIIIQqqq")
_QUIT = _REQUEST.pack(b"QUIT", 0)
_MAX_PAYLOAD = 1 << 20
_NO_SUCH_FILE = 2
_COMMANDS = {
    name: int.from_bytes(name.encode(), "little")
    for name in ("CNXN", "OPEN", "OKAY", "WRTE", "CLSE")
}


def _stat(ident: bytes, mode: int, size: int, error: int = 0) -> bytes:
    return _STAT.pack(ident, error, 0, 0, mode, 1, 0, 0, size, 0, 0, 0)


class _Sync:
    """The sync service of one stream, on bytes; files sent are dropped.

    Args:
        names: files in `FOLDER`.
        content: of each.
    """

    def __init__(self, names: list[str], content: bytes) -> None:
        self._names = names
        self._file = _REQUEST.pack(b"DATA", len(content)) + content + _REQUEST.pack(b"DONE", 0)
        self._size = len(content)
        self._input = bytearray()
        self._receiving = False

    def feed(self, data: bytes) -> bytes:
        """Take what the client sent, and return the answers."""
        self._input += data
        answers = bytearray()
        at = 0
        while (end := self._end_of_request(at)) <= len(self._input):
            answers += self._answer(at)
            at = end
        del self._input[:at]
        return bytes(answers)

    def _end_of_request(self, at: int) -> int:
        end = at + _REQUEST.size
        if end > len(self._input):
            return end
        ident, length = _REQUEST.unpack_from(self._input, at)
        extra = {b"SND2": 12, b"RCV2": 8}.get(ident, 0)
        return end + (0 if ident in {b"DONE", b"QUIT"} else length + extra)

    def _answer(self, at: int) -> bytes:
        ident, length = _REQUEST.unpack_from(self._input, at)
        path = self._input[at + 8 : at + 8 + length]
        if ident == b"DONE":
            return _REQUEST.pack(b"OKAY", 0)
        if ident in {b"RECV", b"RCV2"}:
            return self._file
        if ident in {b"STA2", b"LST2"}:
            known = path == FOLDER.encode()
            return _stat(ident, 0o40755 if known else 0, 0, 0 if known else _NO_SUCH_FILE)
        if ident == b"LIS2":
            entry = _stat(b"DNT2", 0o100644, self._size)
            names = (name.encode() for name in self._names)
            entries = [entry + struct.pack("<I", len(name)) + name for name in names]
            return b"".join(entries) + b"DONE".ljust(_STAT.size + 4, b"\0")
        return b""


class MemoryDaemon:
    """An adb daemon without a disk and without authentication; a context manager.

    Attributes:
        serial: where it listens.
    """

    def __init__(self, names: list[str], content: bytes) -> None:
        self._make_sync = lambda: _Sync(names, content)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.serial = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with peer, peer.makefile("rb") as stream:
                _Transport(peer, self._make_sync).run(stream.read)


class _Transport:
    """The messages of one connection, and its streams."""

    def __init__(self, peer: socket.socket, make_sync: Callable[[], _Sync]) -> None:
        self._peer = peer
        self._make_sync = make_sync
        self._ids = itertools.count(1)
        self._streams: dict[int, _Sync] = {}
        self._waiting: dict[int, bytearray] = {}
        self._may_send: set[int] = set()

    def run(self, read: Callable[[int], bytes]) -> None:
        """Answer until the server leaves."""
        while len(head := read(_HEADER.size)) == _HEADER.size:
            command, arg0, arg1, length, _, _ = _HEADER.unpack(head)
            self._take(command, arg0, arg1, read(length) if length else b"")

    def _send(self, name: str, arg0: int, arg1: int, payload: bytes = b"") -> None:
        command = _COMMANDS[name]
        head = _HEADER.pack(
            command,
            arg0,
            arg1,
            len(payload),
            sum(payload) if name == "CNXN" else 0,
            command ^ 0xFFFFFFFF,
        )
        self._peer.sendall(head + payload)

    def _take(self, command: int, arg0: int, arg1: int, payload: bytes) -> None:
        if command == _COMMANDS["CNXN"]:
            self._send("CNXN", 0x01000001, _MAX_PAYLOAD, _BANNER)
        elif command == _COMMANDS["OPEN"]:
            own = next(self._ids)
            if not payload.startswith(b"sync:"):
                self._send("CLSE", 0, arg0)
                return
            self._streams[own], self._waiting[own] = self._make_sync(), bytearray()
            self._may_send.add(own)
            self._send("OKAY", own, arg0)
        elif arg1 not in self._streams:
            return
        elif command == _COMMANDS["WRTE"]:
            self._send("OKAY", arg1, arg0)
            self._waiting[arg1] += self._streams[arg1].feed(payload)
            self._flush(arg1, arg0)
            if payload.endswith(_QUIT):
                self._send("CLSE", arg1, arg0)
        elif command == _COMMANDS["OKAY"]:
            self._may_send.add(arg1)
            self._flush(arg1, arg0)
        elif command == _COMMANDS["CLSE"]:
            del self._streams[arg1]
            self._send("CLSE", arg1, arg0)

    def _flush(self, own: int, other: int) -> None:
        waiting = self._waiting[own]
        if waiting and own in self._may_send:
            self._may_send.remove(own)
            self._send("WRTE", own, other, bytes(waiting[:_MAX_PAYLOAD]))
            del waiting[:_MAX_PAYLOAD]


class Bench:
    """One device, and the files on both sides of it."""

    def __init__(self, device: "Device", adb: str, source: Path, scratch: Path) -> None:
        self._device = device
        self._adb = adb
        self._files = sorted(source.iterdir())
        self._source = source
        self._back = scratch / "back"

    def seconds(self, act: str) -> float:
        """Return the seconds of one of `ACTS` with all files."""
        shutil.rmtree(self._back, ignore_errors=True)
        self._back.mkdir()
        began = time.monotonic()
        getattr(self, "_" + act.replace(" ", "_"))()
        took = time.monotonic() - began
        if "pull" in act and len(list(self._back.rglob("*.json"))) != len(self._files):
            raise SystemExit(f"{act} left files out")
        return took

    def _adb_push(self) -> None:
        self._run_adb("push", f"{self._source}/.", FOLDER)

    def _adb_pull(self) -> None:
        self._run_adb("pull", FOLDER, str(self._back))

    def _push_many(self) -> None:
        from harness.devices.base import PushItem

        self._device.push_many([PushItem(path, f"{FOLDER}/{path.name}") for path in self._files])

    def _pull_many(self) -> None:
        from harness.devices.base import PullItem

        self._device.pull_many(
            [PullItem(f"{FOLDER}/{path.name}", self._back / path.name) for path in self._files]
        )

    def _run_adb(self, *arguments: str) -> None:
        command = [self._adb, "-s", self._device.serial, *arguments]
        subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def benches(folder: Path, source: Path, content: bytes) -> Iterator[dict[str, Bench]]:
    """Start the virtual device and the daemon in memory, behind an adb server of their own."""
    with private_adb(folder) as server:
        from harness.devices.adb.transport import AdbTransport
        from harness.devices.device import Device
        from plugins.virtual_android import manager

        names = [path.name for path in source.iterdir()]
        try:
            virtual = manager.start("bench", SOC)
            with MemoryDaemon(names, content) as memory:
                found = {}
                for name, serial in (("virtual", virtual.serial), ("memory", memory.serial)):
                    server.connect(serial)
                    device = Device(AdbTransport(server, serial))
                    found[name] = Bench(device, str(server.adb_path), source, folder)
                yield found
        finally:
            manager.remove("bench")


def run(folder: Path, count: int, size: int, repetitions: int) -> bool:
    """Make the files, measure and report; whether all limits hold."""
    source = folder / "many"
    source.mkdir()
    content = os.urandom(size)
    for number in range(count):
        (source / f"{number:06}.json").write_bytes(content)
    print(f"{count} files of {size} bytes, {repetitions} times; load {os.getloadavg()[0]:.1f}")
    rates: dict[tuple[str, str], list[float]] = {}
    with benches(folder, source, content) as found:
        for _ in range(repetitions):
            for act, (name, bench) in itertools.product(ACTS, found.items()):
                rates.setdefault((act, name), []).append(count / bench.seconds(act))
    print(f"{'files/s':10} {'virtual device':>18} {'from memory':>14} {'ratio':>6}")
    good = True
    for act in ACTS:
        device, memory = (median(rates[act, name]) for name in ("virtual", "memory"))
        good &= device >= LEAST_FILES_PER_S
        verdict = "ok" if device >= LEAST_FILES_PER_S else f"MISS, below {LEAST_FILES_PER_S}"
        print(f"{act:10} {device:18.0f} {memory:14.0f} {device / memory:6.2f} {verdict}")
    return good


def main() -> int:
    """Run the benchmark; return 0 if all limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=1000, help="size of each file")
    parser.add_argument("--repetitions", type=int, default=3, help="of each, by turns")
    parser.add_argument("--folder", type=Path, help="work here, not in a temporary folder")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="qnnfarm-small-", dir=args.folder))
    try:
        return 0 if run(root, args.files, args.bytes, args.repetitions) else 1
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
