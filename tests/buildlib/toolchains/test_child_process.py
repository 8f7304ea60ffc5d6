"""Every end of a child process becomes a result or a typed error."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from buildlib.cancellation import CancelScope
from buildlib.errors import BuildError, ToolchainError, ToolchainTimeoutError
from buildlib.toolchains.child_process import Step, run_step
from tests.waiting import is_alive, wait_for

_LONG_S = 120  # before a test gives up: no measure of speed

WORKER = """
import ctypes, json, os, pathlib, signal, subprocess, sys, time
from buildlib.toolchains.child_process import serve
from buildlib.toolchains.qnn.refusal import RefusedError

def refuse(request):
    print("\\x1b[31mthe reason\\x1b[0m is above")
    raise RefusedError("no such\\nthing")

def warns(request):
    print("[1;31m[E:onnxruntime:, x.cc:1] the cause")
    print("[2] tiling.h:280:WARNING:Tried to assign")
    print(" <W> Initializing HtpProvider")
    raise RefusedError("refused")

def broken(request):
    return 1 / 0

def killed(request):
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def aborts(request):
    os.abort()

def segfault(request):
    ctypes.string_at(0)

def garbage(request):
    pathlib.Path(sys.argv[2]).write_bytes(b"\\xff{{{")
    os._exit(0)

def list_answer(request):
    pathlib.Path(sys.argv[2]).write_text("[1]")
    os._exit(0)

def sleeps(request):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(request.decode()).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)

def floods(request):
    for _ in range(20000):
        print("x" * 1000)
    os._exit(3)

def echo(request):
    import numpy  # which starts a thread for each core, unless told
    return {"said": request.decode(), "threads": len(os.listdir("/proc/self/task"))}

serve({name: value for name, value in globals().items() if callable(value)}, sys.argv[1:])
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "odd_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "odd_worker"


def run(
    module: str, command: str, log_dir: Path, *, body: bytes = b"", timeout_s: float = 120
) -> object:
    step = Step(module, command, Path("model.onnx"), timeout_s, "/nowhere")
    return run_step(step, body, log_dir)


def test_answer_comes_back(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    logs = tmp_path / "logs"
    assert run(module, "echo", logs, body=b"hello") == {"said": "hello", "threads": 1}
    assert len(list(logs.iterdir())) == 1


@pytest.mark.parametrize(
    ("command", "status", "reason", "tail"),
    [
        ("refuse", 1, "no such thing", "the reason is above"),
        ("warns", 1, "refused", "[1;31m[E:onnxruntime:, x.cc:1] the cause"),  # and no warnings
        ("floods", 3, "status 3", "x" * 400),
        ("broken", 1, "ZeroDivisionError: division by zero", None),
        ("killed", -signal.SIGKILL, "ended by SIGKILL.*memory", "last words"),
        ("aborts", -signal.SIGABRT, "ended by SIGABRT", None),
        ("segfault", -signal.SIGSEGV, "ended by SIGSEGV", None),
        ("garbage", 0, "no answer", None),
        ("list_answer", 0, "no answer", None),
        ("unknown_command", 1, "KeyError", None),
    ],
)
def test_death_is_a_typed_error_with_the_end_of_the_log(
    command: str, status: int, reason: str, tail: str | None, module: str, tmp_path: Path
) -> None:
    with pytest.raises(ToolchainError, match=reason) as caught:
        run(module, command, tmp_path / "logs")
    error = caught.value
    assert (error.step, error.subject, error.exit_status) == (command, "model.onnx", status)
    assert "\n" not in str(error)
    assert len(str(error)) < 2000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - our own bytes
    assert Path(error.log_path).is_file()
    if tail is not None:
        assert error.log_tail[-1] == tail
        assert len(error.log_tail) == 1 or (command == "floods" and len(error.log_tail) <= 20)


def test_time_out_kills_all_descendants(module: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    for timeout_s in (2, 15, 75):  # a busy machine may take long until the worker has begun
        with pytest.raises(ToolchainTimeoutError) as caught:
            run(module, "sleeps", tmp_path / "logs", body=str(pids).encode(), timeout_s=timeout_s)
        assert caught.value.exit_status is None
        if pids.exists() and pids.read_text():
            break
    wait_for(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))


def test_a_step_that_is_cancelled_leaves_no_log(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    scope = CancelScope()
    scope.cancel()
    step = Step(module, "sleeps", Path("model.onnx"), _LONG_S, "/nowhere")
    with scope.enter(), pytest.raises(BuildError, match="cancelled"):
        run_step(step, str(tmp_path / "pids").encode())
    assert list((tmp_path / "tmp").iterdir()) == []


def test_child_does_not_outlive_a_killed_parent(module: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
        from pathlib import Path
        from buildlib.toolchains.child_process import Step, run_step
        step = Step({module!r}, "sleeps", Path("m"), 60, "/nowhere")
        run_step(step, {str(pids).encode()!r}, Path({str(tmp_path / "logs")!r}))
    """
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # a killed parent leaves its scratch
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment)
    wait_for(lambda: pids.exists() and pids.read_text())
    worker, grandchild = (int(pid) for pid in pids.read_text().split())
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_alive(worker))
    if is_alive(grandchild):  # the libraries start none; ours to clean up here
        os.kill(grandchild, signal.SIGKILL)
