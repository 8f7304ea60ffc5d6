"""An adb server, keys, state and cache that nothing else uses."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.adb.client import AdbServer


@contextlib.contextmanager
def private_adb(folder: Path) -> Iterator["AdbServer"]:
    """Points this process and its children at `folder`; gives the server, and ends it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name in [name for name in os.environ if name.startswith(("ANDROID_", "ADB_"))]:
        del os.environ[name]
    os.environ |= {
        "HOME": str(folder),
        "ADB_SERVER_SOCKET": f"tcp:127.0.0.1:{port}",
        "ADB_LOCAL_TRANSPORT_MAX_PORT": "0",
        "ADB_MDNS": "0",
        "QNNFARM_STATE_DIR": str(folder / "state"),
        "QNNFARM_CACHE_DIR": str(folder / "cache"),
    }
    from harness.adb.server import ensure_server

    server = ensure_server()
    try:
        yield server
    finally:
        subprocess.run([str(server.adb_path), "kill-server"], check=False, capture_output=True)
