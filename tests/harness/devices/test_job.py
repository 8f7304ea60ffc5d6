"""What a job writes first, and that killing it leaves nothing of it and hits nobody else."""

import contextlib
import io
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.devices.commands import Job
from tests.system import program


@pytest.fixture(params=["sh", "bash", "mksh"])
def shell(request: pytest.FixtureRequest) -> str:
    return str(program(request.param))


def _fed(job: Job, stream: bytes, cuts: list[int]) -> bytes:
    """What comes out of a job's stdout that arrives in pieces."""
    sink = io.BytesIO()
    output, _ = job.outputs(sink, io.BytesIO(), on_end=lambda: None)
    points = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    for begin, end in itertools.pairwise(points):
        output.write(memoryview(stream)[begin:end])
    output.close()
    return sink.getvalue()


_NOISE = st.one_of(st.just(b""), st.binary(max_size=60), st.just(b"Welcome to\nqnnfarm-job "))


@given(_NOISE, st.binary(max_size=60), st.lists(st.integers(0, 180), max_size=8))
def test_output_after_the_greeting_is_kept(noise: bytes, rest: bytes, cuts: list[int]) -> None:
    job = Job("true")
    assert _fed(job, noise + f"qnnfarm-job {job.token}\n".encode() + rest, cuts) == rest
    assert job.started


@given(
    st.one_of(
        st.binary(max_size=120),
        st.sampled_from([b"qnnfarm-job ", b"qnnfarm-job other\nx", b"q", b"qnnfarm-job \n"]),
    ),
    st.lists(st.integers(0, 120), max_size=8),
)
def test_without_a_greeting_nothing_goes(stream: bytes, cuts: list[int]) -> None:
    job = Job("true")
    assert _fed(job, stream, cuts) == stream
    assert not job.started


def _ended(job: Job, stdout: bytes, stderr: bytes, cut: int) -> tuple[bytes, bytes, int]:
    """What comes out of both streams in pieces of `cut` bytes, and how often the end was told."""
    sinks, ends = (io.BytesIO(), io.BytesIO()), []
    outputs = job.outputs(*sinks, on_end=lambda: ends.append(job.status))
    for output, stream in zip(outputs, (stdout, stderr), strict=True):
        for start in range(0, len(stream), cut):
            output.write(stream[start : start + cut])
        output.close()
    return sinks[0].getvalue(), sinks[1].getvalue(), len(ends)


@pytest.mark.parametrize("line", ["printf out; printf err >&2; exit 7", "kill -9 $$", "exec >&-"])
def test_every_shell_tells_the_end_on_both_streams(shell: str, line: str) -> None:
    job = Job(line)
    done = subprocess.run([shell, "-c", job.script], capture_output=True, check=False)
    stdout, stderr, ends = _ended(job, done.stdout, done.stderr, 7)
    assert (job.status, ends) == (done.returncode, 1)
    wrote = "printf" in line
    assert (stdout, stderr) == ((b"out", b"err") if wrote else (b"", b""))


@given(st.binary(max_size=90), st.binary(max_size=60), st.integers(1, 90), st.integers(0, 255))
def test_the_end_is_taken_out_wherever_it_is_cut(
    before: bytes, after: bytes, cut: int, status: int
) -> None:
    job = Job("true")
    end = job.farewell + b"%d\n" % status
    stdout = job.greeting + before + end + after
    assert _ended(job, stdout, before + end + after, cut) == (before + after, before + after, 1)
    assert job.status == status


@given(st.lists(st.sampled_from(["farewell", "q", "qnnfarm-end ", "1", "99999", "x", "\n"])))
def test_output_that_only_resembles_the_end_is_kept(pieces: list[str]) -> None:
    """A command cannot know the token; one that prints it all the same gets its output back."""
    job = Job("true")
    text = b"".join(job.farewell if p == "farewell" else p.encode() for p in pieces)
    stdout, stderr, ends = _ended(job, job.greeting + text, text, 3)
    if not ends and job.farewell not in text:
        assert stdout == stderr == text


def test_output_without_a_greeting_is_not_held_back_for_ever() -> None:
    sink = io.BytesIO()
    output, _ = Job("true").outputs(sink, io.BytesIO(), on_end=lambda: None)
    for _ in range(5):
        output.write(bytes(20_000))
    assert len(sink.getvalue()) == 100_000


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


def test_what_left_its_group_is_found_by_a_grep_that_ends_lines_at_nul(
    shell: str, tmp_path: Path
) -> None:
    """As that of Android 13: without -z it finds nothing behind the first variable."""
    (tmp_path / "grep").write_text(
        f'#!/bin/sh\ncase $1 in *z*) exec {shutil.which("grep")} "$@" ;; esac\nexit 1\n'
    )
    (tmp_path / "grep").chmod(0o755)
    job = Job(_ESCAPES)
    with running(shell, job) as process:
        environment = {"PATH": f"{tmp_path}:{os.defpath}"}
        subprocess.run([shell, "-c", job.kill_script], check=True, env=environment)
        assert process.communicate()[0] == job.farewell + b"137\n"  # nobody holds its other end


def test_all_that_is_left_is_killed(shell: str) -> None:
    job, other = Job(_ESCAPES), Job(_ESCAPES)
    with running(shell, other) as spared:
        with running(shell, job) as process:
            subprocess.run([shell, "-c", job.kill_script], check=True)
            assert process.communicate()[0] == job.farewell + b"137\n"  # nobody holds its other end
        assert spared.poll() is None
        subprocess.run([shell, "-c", other.kill_script], check=True)
    subprocess.run([shell, "-c", job.kill_script], check=True)


def test_a_shell_that_runs_no_program_is_killed(shell: str) -> None:
    """Its own `export` would not show in /proc."""
    job = Job("trap '' HUP TERM; echo ready; while :; do :; done")
    with subprocess.Popen([shell, "-c", job.script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)][1] == b"ready\n"
        subprocess.run([shell, "-c", job.kill_script], check=True)
        assert process.wait(200) == 137
