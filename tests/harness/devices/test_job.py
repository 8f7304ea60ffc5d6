"""What a job says first, and that killing it hits nobody else."""

import contextlib
import io
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.devices.job import Job
from tests.system import program


@pytest.fixture(params=["sh", "bash", "mksh"])
def shell(request: pytest.FixtureRequest) -> str:
    return str(program(request.param))


def _fed(job: Job, stream: bytes, cuts: list[int]) -> bytes:
    """What comes out of a job's stdout that arrives in pieces."""
    sink = io.BytesIO()
    output = job.listening(sink)
    points = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    for begin, end in itertools.pairwise(points):
        output.write(memoryview(stream)[begin:end])
    output.close()
    return sink.getvalue()


_NOISE = st.one_of(st.just(b""), st.binary(max_size=60), st.just(b"Welcome to\nqnnfarm-job "))


@given(_NOISE, st.binary(max_size=60), st.lists(st.integers(0, 180), max_size=8))
def test_what_comes_from_the_greeting_on_stays(noise: bytes, rest: bytes, cuts: list[int]) -> None:
    job = Job("true")
    assert _fed(job, noise + f"qnnfarm-job {job.token} 4711\n".encode() + rest, cuts) == rest
    assert job.group == 4711


@given(
    st.one_of(
        st.binary(max_size=120),
        st.sampled_from([b"qnnfarm-job ", b"qnnfarm-job other 12\nx", b"q", b"qnnfarm-job \n"]),
    ),
    st.lists(st.integers(0, 120), max_size=8),
)
def test_without_a_greeting_nothing_goes(stream: bytes, cuts: list[int]) -> None:
    job = Job("true")
    assert _fed(job, stream, cuts) == stream
    assert job.group is None


@pytest.mark.parametrize("number", ["0", "-1", "1x", "12345678901", "1 2", ""])
def test_a_greeting_with_no_number_is_output(number: str) -> None:
    job = Job("true")
    stream = f"qnnfarm-job {job.token} {number}\n".encode()
    assert _fed(job, stream, []) == stream
    assert job.group is None


def test_every_shell_greets(shell: str) -> None:
    for nested in (False, True):
        job = Job("echo out; exit 3", nested=nested)
        done = subprocess.run([shell, "-c", job.script], capture_output=True, check=False)
        assert done.returncode == 3
        assert _fed(job, done.stdout, []) == b"out\n"
        assert job.group is not None


def test_a_process_id_that_went_to_somebody_else_is_left_alone(shell: str) -> None:
    with subprocess.Popen(["sleep", "3600"], start_new_session=True) as other:
        while not Path(f"/proc/{other.pid}/cmdline").read_bytes():  # the kernel is still in exec
            time.sleep(0.01)
        job = Job("true", group=other.pid)
        subprocess.run([shell, "-c", job.kill_script], check=True)
        assert other.poll() is None
        other.kill()


def test_output_without_a_greeting_is_not_held_back_for_ever() -> None:
    sink = io.BytesIO()
    output = Job("true").listening(sink)
    for _ in range(5):
        output.write(bytes(20_000))
    assert len(sink.getvalue()) == 100_000


@pytest.mark.parametrize("rebooted", [False, True])
def test_a_group_without_its_leader_is_killed_but_not_after_a_reboot(
    shell: str, rebooted: bool
) -> None:
    """To a job that is older than the machine, the same number is another group."""
    line = "sleep 3600 >/dev/null 2>&1 & echo $!"
    with subprocess.Popen(
        [shell, "-c", line], stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as leader:
        member = int(leader.communicate()[0])
    group = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()[2]
    assert int(group) == leader.pid
    started = time.monotonic() - (10**9 if rebooted else 0)
    job = Job("true", group=leader.pid, started=started)
    subprocess.run([shell, "-c", job.kill_script], check=True)
    if rebooted:
        assert is_alive(member)
        os.kill(member, signal.SIGKILL)
    end = time.monotonic() + 120
    while is_alive(member):
        assert time.monotonic() < end
        time.sleep(0.02)


_ESCAPES = "setsid sh -c 'echo ready; exec sleep 3600' & sh -c 'echo ready; exec sleep 3600'"


@contextlib.contextmanager
def running(shell: str, job: Job) -> Iterator["subprocess.Popen[bytes]"]:
    """`_ESCAPES`, once both of its processes carry the mark."""
    with subprocess.Popen(
        [shell, "-c", job.script], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[1:] == [b"ready\n", b"ready\n"]
        yield process


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_what_left_its_group_is_found_by_a_grep_that_ends_lines_at_nul(
    shell: str, tmp_path: Path
) -> None:
    """As that of Android 13: without -z it finds nothing behind the first variable."""
    (tmp_path / "grep").write_text(
        f'#!/bin/sh\ncase $1 in *z*) exec {shutil.which("grep")} "$@" ;; esac\n'
        f'[ "$1" = -q ] && exec {shutil.which("grep")} "$@"\nexit 1\n'
    )
    (tmp_path / "grep").chmod(0o755)
    job = Job(_ESCAPES)
    with running(shell, job) as process:
        job.group = process.pid
        environment = {"PATH": f"{tmp_path}:{os.defpath}"}
        subprocess.run([shell, "-c", job.kill_script], check=True, env=environment)
        assert process.communicate()[0] == b""  # nobody holds its other end


def test_all_that_is_left_is_killed(shell: str) -> None:
    job = Job(_ESCAPES)
    with running(shell, job) as process:
        subprocess.run([shell, "-c", job.kill_script], check=True)
        assert process.communicate()[0] == b""  # nobody holds its other end
    subprocess.run([shell, "-c", job.kill_script], check=True)
