"""`qnnfarm run` as its users see it; what plans do is tested in tests/harness/plans."""

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.command_line import Started

_PLAN = "name: quick\npool: pool.yaml\nworkloads: [{kind: command, command: ['true']}]\n"


@pytest.mark.needs("plugins.ssh_devices")
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
            process.send_signal(signal.SIGHUP)
        except BaseException:
            process.kill()
            raise
    _, rest = process.communicate()
    assert said == "looking for silent: a device has 30 s to answer\n", rest
    assert process.returncode == 130, rest


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """As `nohup` and a script's `&` leave them to the commands that they start."""
    ignoring = (
        "import signal, sys; sys.argv = ['qnnfarm', '--version'];"
        "[signal.signal(s, signal.SIG_IGN) for s in (signal.SIGHUP, signal.SIGINT)];"
        "from harness.cli.app import main\n"
        "try: main()\n"
        "finally: print(*(signal.getsignal(s).name for s in (signal.SIGHUP, signal.SIGINT)))"
    )
    done = Started("-c", ignoring, cwd=tmp_path)
    assert done.communicate(timeout=250)[0].splitlines()[-1] == "SIG_IGN SIG_IGN"
