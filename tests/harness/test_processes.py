"""Processes: whether they have ended, whatever the kernel shows of them."""

import os
import subprocess
from pathlib import Path

import pytest

from harness import processes


def start_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_reused_pid_is_another_process() -> None:
    me, started = os.getpid(), start_of(os.getpid())
    assert processes.own_start() == started
    assert not processes.has_ended(me, started)
    assert processes.has_ended(me, started - 1)
    assert processes.has_ended(0, started)
    assert processes.has_ended(1 << 70, started)


def test_a_zombie_has_ended_and_so_has_a_process_that_was_waited_for() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        started = start_of(child.pid)
        assert not processes.has_ended(child.pid, started)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.has_ended(child.pid, started)
        child.wait()
        assert processes.has_ended(child.pid, started)


def test_one_that_proc_hides_has_not_ended_while_its_pid_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "self").mkdir()  # as `hidepid` leaves it
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert not processes.has_ended(child.pid, 1)
        child.kill()
    assert processes.has_ended(child.pid, 1)


def test_where_there_is_no_proc_the_library_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    assert (processes.boot_id(), processes.pid_namespace()) == ("unknown", "")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        started = processes._state_and_start(child.pid)[1]
        assert not processes.has_ended(child.pid, started)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.has_ended(child.pid, started)
    assert processes.has_ended(child.pid, started)
