"""Tasks at once: bounded by workers and memory, ended together."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildlib.builder.scheduler import (
    ScheduledTask,
    available_memory,
    default_workers,
    run_bounded,
)
from buildlib.cancellation import track_child
from buildlib.errors import BuildError, InvalidOptionError
from tests.waiting import is_alive, wait_for

GB = 1 << 30
MEMINFO = "MemTotal:       8000000 kB\nMemAvailable:   4000000 kB\n"
_LONG_S = 120  # before a test gives up: no measure of speed


class Meter:
    """How many tasks, and how much memory, were in use at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now = self.most = self.memory = self.most_memory = 0
        self.order: list[str] = []

    def task(self, name: str, memory: int = 0, seconds: float = 0.01) -> ScheduledTask[str]:
        def run() -> str:
            with self.lock:
                self.order.append(name)
                self.now += 1
                self.memory += memory
                self.most = max(self.most, self.now)
                self.most_memory = max(self.most_memory, self.memory)
            time.sleep(seconds)
            with self.lock:
                self.now -= 1
                self.memory -= memory
            return name

        return ScheduledTask(name, run, memory)


def test_the_longest_task_starts_first_and_results_keep_their_order() -> None:
    meter = Meter()
    tasks = [replace(meter.task(str(cost)), cost=cost) for cost in (16, 46, 92)]
    assert run_bounded(tasks, max_workers=1, memory_bytes=0) == ["16", "46", "92"]
    assert meter.order == ["92", "46", "16"]


def test_a_task_starts_with_what_it_needs() -> None:
    order: list[str] = []

    def runs(name: str) -> Callable[..., str]:
        def run(*given: str) -> str:
            order.append(name)
            return f"{name}({', '.join(given)})"

        return run

    first, second = ScheduledTask("a", runs("a")), ScheduledTask("b", runs("b"), cost=1)
    last = ScheduledTask("c", runs("c"), cost=2, needs=[first, second])
    results = run_bounded([last, first, second], max_workers=1, memory_bytes=0)
    assert results == ["c(a(), b())", "a()", "b()"]
    assert order == ["b", "a", "c"]


def sleeper(pids: Path) -> Callable[[], None]:
    """Starts a child that leads its own session, as the toolchain does."""

    def run() -> None:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with track_child(child):
            with pids.open("a") as file:
                file.write(f"{child.pid}\n")
            child.wait()

    return run


def wait_for_lines(path: Path, count: int) -> list[int]:
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= count)
    return [int(line) for line in path.read_text().split()]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=8),
    st.integers(1, 4),
    st.integers(0, 8),
)
def test_bounds_hold_and_results_keep_their_order(
    sizes: list[int], workers: int, memory: int
) -> None:
    meter = Meter()
    tasks = [meter.task(str(i), size, 0.001) for i, size in enumerate(sizes)]
    results = run_bounded(tasks, max_workers=workers, memory_bytes=memory)
    assert results == [str(i) for i in range(len(sizes))]
    assert meter.most <= workers
    assert meter.most_memory <= max(memory, *sizes, 0)  # one task may be larger
    with pytest.raises(ValueError, match="0 workers"):
        run_bounded([], max_workers=0, memory_bytes=0)


def test_what_fits_passes_what_does_not() -> None:
    small_runs = threading.Event()
    order: list[str] = []

    def small() -> None:
        order.append("small")
        small_runs.set()

    def first() -> None:
        assert small_runs.wait(_LONG_S)

    tasks = [ScheduledTask("a", first, 3), ScheduledTask("large", lambda: order.append("large"), 3)]
    run_bounded([*tasks, ScheduledTask("small", small, 1)], max_workers=2, memory_bytes=4)
    assert order == ["small", "large"]


def test_first_error_ends_the_others(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    error = OSError("first")

    def fails() -> None:
        wait_for_lines(pids, 1)
        raise error

    began = []
    tasks = [
        ScheduledTask("sleeps", sleeper(pids)),
        ScheduledTask("fails", fails),
        ScheduledTask("never", lambda: began.append(1)),
    ]
    with pytest.raises(OSError, match="first") as caught:
        run_bounded(tasks, max_workers=2, memory_bytes=0)
    assert caught.value is error
    assert not began
    assert not any(is_alive(pid) for pid in wait_for_lines(pids, 1))


def test_a_child_that_starts_too_late_is_killed_as_well(tmp_path: Path) -> None:
    failed = threading.Event()
    seen: list[BaseException] = []

    def fails() -> None:
        failed.set()
        raise OSError("first")

    def late() -> None:
        assert failed.wait(_LONG_S)
        time.sleep(0.2)
        try:
            sleeper(tmp_path / "pids")()
        except BuildError as error:
            seen.append(error)
            raise

    with pytest.raises(OSError, match="first"):
        run_bounded(
            [ScheduledTask("late", late), ScheduledTask("fails", fails)],
            max_workers=2,
            memory_bytes=0,
        )
    assert len(seen) == 1


def test_interrupt_kills_children_and_keeps_what_is_finished(tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from buildlib.builder.scheduler import ScheduledTask, run_bounded
        from test_scheduler import sleeper
        folder = Path({str(tmp_path)!r})
        tasks = [
            ScheduledTask("quick", lambda: (folder / "finished").write_text("whole")),
            ScheduledTask("sleeps", sleeper(folder / "pids")),
            ScheduledTask("sleeps too", sleeper(folder / "pids")),
        ]
        try:
            run_bounded(tasks, max_workers=2, memory_bytes=0)
        except KeyboardInterrupt:
            sys.exit(130)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    pids = wait_for_lines(tmp_path / "pids", 2)
    os.kill(parent.pid, signal.SIGINT)
    assert parent.wait(_LONG_S) == 130
    assert not any(is_alive(pid) for pid in pids)
    assert (tmp_path / "finished").read_text() == "whole"


def test_a_signal_that_does_not_end_the_wait_is_seen_soon(tmp_path: Path) -> None:
    """As one that arrives right before the wait, or in a thread other than the waiting one."""
    pids = tmp_path / "pids"
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)

    def interrupt() -> None:
        wait_for_lines(pids, 1)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    def run() -> None:
        threading.Thread(target=interrupt).start()
        sleeper(pids)()

    try:
        with pytest.raises(KeyboardInterrupt):
            run_bounded([ScheduledTask("sleeps", run)], max_workers=1, memory_bytes=0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not any(is_alive(pid) for pid in wait_for_lines(pids, 1))


def test_a_task_whose_start_is_interrupted_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    began, cleaned = threading.Event(), []

    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            began.wait(_LONG_S)
            raise KeyboardInterrupt

    def clean() -> str:
        began.set()
        time.sleep(0.2)  # as it removes its folder
        cleaned.append("folder")
        return ""

    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bounded([ScheduledTask("clean", clean)], max_workers=1, memory_bytes=GB)
    assert cleaned


def test_the_user_sets_how_many_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAIRT_MAX_BUILD_WORKERS", "3")
    assert default_workers() == 3
    for wrong in ("0", "-1", "two", "\u0663"):
        monkeypatch.setenv("QAIRT_MAX_BUILD_WORKERS", wrong)
        with pytest.raises(InvalidOptionError, match="QAIRT_MAX_BUILD_WORKERS"):
            default_workers()
    monkeypatch.delenv("QAIRT_MAX_BUILD_WORKERS")
    assert default_workers() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("", {}, 4_000_000 * 1024),
        ("0::/a/b\n", {"a/memory.max": "900", "a/memory.current": "400"}, 500),
        (
            "0::/a/b\n",
            {
                "a/memory.max": "900",
                "a/memory.current": "400",
                "a/memory.stat": "anon 300\ninactive_file 50\n",
                "a/b/memory.max": "max",
                "a/b/memory.current": "400",
            },
            550,
        ),
        (
            "4:cpu,memory:/x\n1:name=systemd:/\n",
            {"memory/x/memory.limit_in_bytes": "70", "memory/x/memory.usage_in_bytes": "90"},
            0,
        ),
        ("garbage\n::\n0:memory\n", {}, 4_000_000 * 1024),
    ],
)
def test_the_tightest_control_group_counts(
    membership: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert 0 < available_memory() < 1 << 50  # of this machine
    assert available_memory(tmp_path, tmp_path) == 4 << 30  # where nothing is known
    system = {"proc/meminfo": MEMINFO, "proc/self/cgroup": membership}
    system |= {f"cgroup/{name}": text + "\n" for name, text in files.items()}
    for name, text in system.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path / "proc", tmp_path / "cgroup") == expected
