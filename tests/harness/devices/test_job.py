"""What a job says first, and that killing it hits nobody else."""

import io
import itertools
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.devices.job import Job


def _fed(job: Job, stream: bytes, cuts: list[int]) -> bytes:
    """What comes out of a job's stdout that arrives in pieces."""
    sink = io.BytesIO()
    output = job.listening(sink)
    points = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    for begin, end in itertools.pairwise(points):
        output.write(memoryview(stream)[begin:end])
    output.close()
    return sink.getvalue()


@given(st.binary(max_size=60), st.lists(st.integers(0, 120), max_size=8))
def test_the_greeting_goes_and_everything_else_stays(rest: bytes, cuts: list[int]) -> None:
    job = Job("true")
    assert _fed(job, f"qnnfarm-job {job.token} 4711\n".encode() + rest, cuts) == rest
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


@pytest.mark.parametrize("shell", ["sh", "mksh", "bash"])
def test_every_shell_greets(shell: str) -> None:
    for nested in (False, True):
        job = Job("echo out; exit 3", nested=nested)
        done = subprocess.run([shell, "-c", job.script], capture_output=True, check=False)
        assert done.returncode == 3
        assert _fed(job, done.stdout, []) == b"out\n"
        assert job.group is not None


@pytest.mark.parametrize("shell", ["sh", "mksh"])
def test_a_process_id_that_went_to_somebody_else_is_left_alone(shell: str) -> None:
    with subprocess.Popen(["sleep", "3600"], start_new_session=True) as other:
        job = Job("true", group=other.pid)
        subprocess.run([shell, "-c", job.kill_script], check=True)
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("shell", ["sh", "mksh"])
def test_all_that_is_left_is_killed(shell: str) -> None:
    job = Job("setsid sleep 3600 & echo ready; sleep 3600")
    with subprocess.Popen(
        [shell, "-c", job.script], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != b"ready\n":
            pass
        subprocess.run([shell, "-c", job.kill_script], check=True)
        assert process.stdout.read() == b""  # nobody holds its other end
        assert process.wait() == -9 or job.group is None
    subprocess.run([shell, "-c", job.kill_script], check=True)
