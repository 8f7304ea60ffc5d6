"""Scheduler of tasks, bounded by workers and memory.

Tasks run in threads: their heavy work happens in child processes.
"""

import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar, cast

from buildlib.cancellation import CancelScope
from buildlib.errors import InvalidOptionError

T = TypeVar("T")

WORKERS_VARIABLE = "QAIRT_MAX_BUILD_WORKERS"
_LOOK_S = 0.5
_Ended: TypeAlias = tuple[int, T | None, BaseException | None]
"""Number of a task with its result, or with what it raised."""


@dataclass(frozen=True, eq=False)
class ScheduledTask(Generic[T]):
    """One task.

    Attributes:
        run: called with the results of the needed tasks.
        memory_bytes: peak of the task and its child processes.
        cost: how long it takes with all that waits for it, in any unit.
        needs: tasks that end before it starts.
    """

    name: str
    run: Callable[..., T]
    memory_bytes: int = 0
    cost: float = 0
    needs: "Sequence[ScheduledTask[T]]" = ()


def default_workers() -> int:
    """Return the number of cores for this process; `QAIRT_MAX_BUILD_WORKERS` overrides it."""
    text = os.environ.get(WORKERS_VARIABLE)
    if not text:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InvalidOptionError(WORKERS_VARIABLE, f"{text!r} is not a number from 1 up", ())
    return int(text)


def run_bounded(
    tasks: Sequence[ScheduledTask[T]], *, max_workers: int, memory_bytes: int
) -> list[T]:
    """Run all tasks, and return their results in the order of the tasks.

    Of the waiting tasks that can run and fit, the one that takes longest starts next, so that no
    long one is left for the end; a task that runs alone always fits. When a task fails, or the
    caller is interrupted, no other starts, the child processes of running tasks are killed, and the
    call returns once all threads have ended.

    Args:
        tasks: with all that they need.
        max_workers: tasks at once.
        memory_bytes: for all tasks that run at once.

    Raises:
        ValueError: no worker.
        BaseException: the first that a task raised, or the caller's `KeyboardInterrupt`.
    """
    if max_workers < 1:
        raise ValueError(f"{max_workers} workers")
    return _Run(tasks, max_workers, memory_bytes).results()


class _Run(Generic[T]):
    """One call of `run_bounded`: the caller's thread decides, the others only work.

    A signal can interrupt the caller's thread between any two bytecodes, so it shares no lock of
    Python's with them, which it could leave locked.
    """

    def __init__(
        self, tasks: Sequence[ScheduledTask[T]], max_workers: int, memory_bytes: int
    ) -> None:
        self._tasks = tasks
        self._max_workers = max_workers
        self._memory_bytes = memory_bytes
        self._waiting = sorted(range(len(tasks)), key=lambda number: -tasks[number].cost)
        numbers = {task: number for number, task in enumerate(tasks)}
        self._needs = [[numbers[need] for need in task.needs] for task in tasks]
        self._running: set[int] = set()
        self._ended: queue.SimpleQueue[_Ended[T]] = queue.SimpleQueue()
        self._results: dict[int, T] = {}
        self._scope = CancelScope()
        self._threads: list[threading.Thread] = []

    def results(self) -> list[T]:
        try:
            while self._waiting or self._running:
                self._start_fitting()
                number, result, error = self._next_ended()
                self._running.discard(number)
                if error is not None:
                    raise error
                self._results[number] = cast("T", result)
        finally:
            if self._waiting or self._running:
                self._scope.cancel()
            for thread in self._threads:
                if thread.is_alive():
                    thread.join()
        return [self._results[number] for number in range(len(self._tasks))]

    def _start_fitting(self) -> None:
        """Start every waiting task that can run and fits."""
        memory = sum(self._tasks[number].memory_bytes for number in self._running)
        for number in list(self._waiting):
            if len(self._running) >= self._max_workers:
                return
            needed = self._tasks[number].memory_bytes
            if self._running and memory + needed > self._memory_bytes:
                continue
            if not self._results.keys() >= set(self._needs[number]):
                continue
            self._waiting.remove(number)
            self._running.add(number)
            memory += needed
            name = self._tasks[number].name
            # A daemon: if a signal interrupts its start, it may wait for ever to begin.
            work = partial(contextvars.copy_context().run, self._work, number)
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads.append(thread)  # first, as a signal may interrupt the start
            thread.start()

    def _next_ended(self) -> "_Ended[T]":
        """Wait for the next task that ends.

        Looks up now and then: a signal that arrives right before a wait, or in another thread, does
        not end it, and its handler would only run with the next bytecode.
        """
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ended.get(timeout=_LOOK_S)

    def _work(self, number: int) -> None:
        inputs = [self._results[need] for need in self._needs[number]]
        try:
            with self._scope.enter():
                self._ended.put((number, self._tasks[number].run(*inputs), None))
        except BaseException as error:  # noqa: BLE001 - it is raised by the caller's thread
            self._ended.put((number, None, error))


_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_UNKNOWN = 4 << 30


def available_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Return the bytes that this process and its children may still take.

    The minimum of the machine's available memory and of the rest that our control groups allow;
    4 GiB where neither gives a limit.
    """
    limits = [
        *_machine_memory(proc / "meminfo"),
        *_control_group_memory(proc / "self" / "cgroup", cgroup),
    ]
    return max(0, min(limits, default=_UNKNOWN))


def usable_memory() -> int:
    """Return the bytes that the tasks of a build may take at once: two thirds of the available.

    A third stays for the page cache, through which all weights are read, and for others.
    """
    return available_memory() * 2 // 3


def _machine_memory(meminfo: Path) -> list[int]:
    for line in _text(meminfo).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and rest.split():
            return [int(rest.split()[0]) * 1024]
    return []


def _control_group_memory(membership: Path, root: Path) -> list[int]:
    """Yield the memory left in each control group, version 1 or 2, from ours to the root."""
    limits = []
    for line in _text(membership).splitlines():
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        relative = Path(path.lstrip("/"))
        for group in (relative, *relative.parents):
            most, current = (_text(base / group / name).strip() for name in (limit, usage))
            if most.isdigit() and current.isdigit():
                limits.append(int(most) - int(current) + _reclaimable(base / group))
    return limits


def _reclaimable(group: Path) -> int:
    """Return the page cache that the kernel gives up when memory is short."""
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in {"inactive_file", "total_inactive_file"} and value.isdigit():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
