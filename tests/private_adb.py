"""An adb server, keys, state and cache that nothing else uses: for benchmarks and for tests."""

import contextlib
import os
import random
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from harness.devices.adb.client import AdbServer

# Below what the kernel hands out by itself, or somebody's connection may take the port between our
# look and the server's start.
_PORTS = range(12_000, 32_000)
_FOREIGN = ("ANDROID_", "ADB_")


def free_port() -> int:
    """A port where nothing listens, for servers that cannot choose one themselves, as adb."""
    while True:
        port = random.choice(_PORTS)  # noqa: S311 - nothing secret about it
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port


def private_variables(folder: Path, port: int) -> dict[str, str]:
    """What leads adb and the harness to `folder`, and to a server at `port`."""
    return {
        "HOME": str(folder),
        "ADB_SERVER_SOCKET": f"tcp:127.0.0.1:{port}",
        "ADB_LOCAL_TRANSPORT_MAX_PORT": "0",  # else it tries 5555 to 5585
        "ADB_MDNS": "0",
        "QNNFARM_STATE_DIR": str(folder / "state"),
        "QNNFARM_CACHE_DIR": str(folder / "cache"),
    }


@contextlib.contextmanager
def private_environment(folder: Path, port: int) -> Iterator[None]:
    """This process and its children see those variables, and no others of adb's, meanwhile."""
    own = private_variables(folder, port)
    foreign = [name for name in os.environ if name.startswith(_FOREIGN)]
    before = {name: os.environ.get(name) for name in {*own, *foreign}}
    for name in foreign:
        del os.environ[name]
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def private_adb(folder: Path) -> Iterator["AdbServer"]:
    """Points this process and its children at `folder`; gives the server, and ends it."""
    from harness.devices.adb.server import ensure_server

    with private_environment(folder, free_port()):
        server = ensure_server()
        try:
            yield server
        finally:
            subprocess.run([str(server.adb_path), "kill-server"], check=False, capture_output=True)


def end_servers(folder: Path) -> None:
    """End adb servers whose files lie in a folder: they outlive whoever has started them."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
