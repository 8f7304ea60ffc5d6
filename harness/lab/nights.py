"""Nights of a lab: of all workers that know a plan's nights, one runs each, when it is due.

A night is a periodic job of procrastinate: the first worker that puts it into the queue for a time
is the only one, and one of them takes it and runs `qnnfarm nightly --lab`.
"""

import contextlib
import hashlib
import subprocess
import sys
import time
from pathlib import Path

import croniter
from procrastinate.jobs import Job, Status

from buildlib.toolchains.child_process import dying_with_parent
from harness.errors import StoreError, WrongUseError
from harness.exit_codes import NO_ANSWER
from harness.lab.jobs import LabJobs, Taken, insist
from harness.lab.service import Service
from harness.pool.status import OnProgress

TASK = "qnnfarm_night"
_TICK_S = 1.0
_LATE_S = 600.0
"""A night that no worker began within this time is left out, as procrastinate itself does."""


def check_cron(cron: str) -> None:
    """Check the times of nights."""
    if not croniter.croniter.is_valid(cron):
        raise WrongUseError(f"--cron takes five fields such as '0 2 * * *', in UTC, not {cron!r}")


class Nights(Service):
    """Puts the nights of a plan into the queue, and runs those that it takes, one at a time.

    Args:
        jobs: of the lab.
        plan_file: the plan; all workers have it.
        name: of the plan, which identifies it in the lab.
        cron: when nights begin, in UTC.
        tell: called with a line when a night begins or ends.
    """

    def __init__(
        self, jobs: LabJobs, plan_file: Path, name: str, cron: str, tell: OnProgress
    ) -> None:
        self._jobs = jobs
        self._plan_file = plan_file
        self._name = name
        self._cron = cron
        self._tell = tell
        self._queue = f"night-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        self._put_at = 0
        self._running: tuple[Taken, subprocess.Popen[bytes]] | None = None
        super().__init__(_TICK_S)

    def close(self) -> None:
        """End the night that runs here, and let another worker go on with it."""
        super().close()
        if self._running is not None:
            job, process = self._running
            process.terminate()
            process.wait()
            insist(lambda: self._jobs.give_back(job))

    def _work(self) -> None:
        with contextlib.suppress(StoreError):  # the worker tells of it
            self._put_due()
            if self._running is None:
                self._take()
        if self._running is not None and self._running[1].poll() is not None:
            self._end(*self._running)

    def _put_due(self) -> None:
        """Put the newest night that is due into the queue, unless somebody did."""
        now = time.time()
        due = round(croniter.croniter(self._cron, now).get_prev(float))
        if due <= self._put_at or now - due > _LATE_S:
            return
        job = Job(
            queue=self._queue,
            lock=None,
            queueing_lock=self._queue,
            task_name=TASK,
            task_kwargs={"plan": self._name, "timestamp": due},
        )
        self._jobs.put_once(job, self._name, due)
        self._put_at = due

    def _take(self) -> None:
        job = self._jobs.take(self._queue)
        if job is not None:
            words = ["nightly", str(self._plan_file), "--lab"]
            command = [sys.executable, "-m", "harness.cli", *words]
            process = subprocess.Popen(dying_with_parent(command), start_new_session=True)
            self._running = job, process
            self._tell(f"a night of {self._name} begins")

    def _end(self, taken: Taken, process: "subprocess.Popen[bytes]") -> None:
        code, self._running = process.returncode, None
        status = Status.FAILED if not 0 <= code < NO_ANSWER else Status.SUCCEEDED
        self._tell(f"a night of {self._name} ended with exit code {code}")
        insist(lambda: self._jobs.finish(taken, status))
