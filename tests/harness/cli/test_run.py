"""`qnnfarm run` as its users see it; what plans do is tested in tests/harness/plans."""

import os
import signal
import socket
from pathlib import Path

from tests.command_line import Started

_PLAN = "name: quick\npool: pool.yaml\nworkloads: [{kind: command, command: ['true']}]\n"


def test_who_looks_for_devices_says_for_which(adb_environment: Path, tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / "plan.yaml").write_text(_PLAN)
    (tmp_path / "pool.yaml").write_text("devices: [{type: linux, identifier: silent}]\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        options = f"HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n  ConnectTimeout 120\n"
        (tmp_path / ".ssh" / "config").write_text(f"Host silent\n  {options}")
        words = ("run", tmp_path / "plan.yaml", "--db", "r.db")
        home = os.environ | {"HOME": str(tmp_path)}
        process = Started(*words, cwd=adb_environment, env=home)
        try:
            said = process.stderr.readline()
            process.send_signal(signal.SIGINT)
        except BaseException:
            process.kill()
            raise
    _, rest = process.communicate()
    assert said == "looking for silent: a device has 30 s to answer\n", rest
    assert process.returncode == 130, rest
