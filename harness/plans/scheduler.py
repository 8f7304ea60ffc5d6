"""Scheduler: runs cells on leased devices, with one queue and a thread for each device."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from buildlib.error_base import QnnfarmError
from harness.errors import (
    FailureClass,
    HarnessError,
    LeaseTimeoutError,
    PoolError,
    RequirementError,
    one_line,
)
from harness.plans.cancellation import CellInterrupted
from harness.plans.cell_queue import CellQueue, Durations
from harness.plans.cells import Cell
from harness.plans.lease_requests import LeaseRequests, PlacementRules, PoolSnapshot, serves
from harness.plans.outcome import CellOutcome, Summary
from harness.plans.outcome_log import Attempt, OutcomeLog
from harness.plans.protocols import (
    CellRunner,
    DevicePool,
    Observer,
    Queue,
    Recorder,
)
from harness.plans.wait_notices import WaitNotices
from harness.pool.lease import Lease
from harness.pool.owner import this_process
from harness.pool.requirement import Requirement

_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class MatrixOptions:
    """Options of running a matrix.

    Attributes:
        max_parallel: most devices at once; `None` for no limit.
        lease_s: how long cells wait while no device at all is free for them.
        purpose: shown by the pool as the use of its devices.
    """

    max_parallel: int | None = None
    lease_s: float = 3600.0
    purpose: str = "qnnfarm run"


def run_matrix(
    cells: Sequence[Cell],
    pool: DevicePool,
    runner: CellRunner,
    recorder: Recorder,
    *,
    options: MatrixOptions | None = None,
    observer: Observer | None = None,
    done: Mapping[str, CellOutcome] = MappingProxyType({}),
    durations: Mapping[str, float] = MappingProxyType({}),
) -> Summary:
    """Run all cells that are not done.

    A KeyboardInterrupt in this thread ends the run: no more cells begin, running ones are ended on
    their devices, leases are given back, and the summary counts the rest. A second
    KeyboardInterrupt propagates at once.

    Args:
        done: outcomes of earlier runs of the plan, by the keys of their cells.
        durations: seconds that cells took in earlier runs, by their keys.

    Raises:
        StoreError, LedgerError: progress cannot be recorded, so the run ends.
    """
    outcomes = {cell.key: done.get(cell.key) or CellOutcome(cell) for cell in cells}
    waiting = [cell for cell in cells if cell.key not in done]
    queue = CellQueue(waiting, Durations(cells, durations))
    observer = observer or Observer()
    log = OutcomeLog(outcomes, recorder, observer)
    scheduler = Scheduler(queue, log, pool, runner, options or MatrixOptions(), observer)
    start = time.monotonic()
    interrupted = scheduler.run()
    return Summary(log.outcomes, time.monotonic() - start, interrupted)


class Scheduler:
    """Runs the cells of a queue until it is empty. `_changed` guards all that changes.

    Attributes:
        members: the pool's devices, as they were a second ago at most.
    """

    def __init__(
        self,
        queue: Queue,
        log: OutcomeLog,
        pool: DevicePool,
        runner: CellRunner,
        options: MatrixOptions,
        observer: Observer,
    ) -> None:
        self._queue = queue
        self._log = log
        self._pool = pool
        self._runner = runner
        self._purpose = options.purpose
        self._observer = observer
        own = f"{this_process().label}: {one_line(self._purpose, 120)}"
        self._notices = WaitNotices(observer, own=own)
        self._changed = threading.Condition()
        self.members = PoolSnapshot(())
        self._placement = PlacementRules()
        self._requests = LeaseRequests(
            queue,
            self._placement,
            self._fail,
            max_parallel=options.max_parallel,
            lease_s=options.lease_s,
        )
        self._leased: dict[str, Attempt | None] = {}
        self._threads: set[threading.Thread] = set()
        self._is_stopping = False
        self._fatal: BaseException | None = None

    def interrupt(self, keys: Collection[str]) -> None:
        """End the cells of these keys that run."""
        with self._changed:
            attempts = [one for one in self._leased.values() if one and one.cell.key in keys]
        for attempt in attempts:
            threading.Thread(target=attempt.cancel.interrupt, daemon=True).start()

    def run(self) -> bool:
        """Run all waiting cells; return whether the run was interrupted."""
        interrupted = False
        try:
            self._loop()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._stop(notify=interrupted)
            self._wait_for_threads()
        if self._fatal is not None:
            raise self._fatal
        return interrupted

    def _loop(self) -> None:
        refreshed = float("-inf")
        while True:
            if self._queue and time.monotonic() - refreshed >= 1.0:
                members = PoolSnapshot(self._pool.members())
                refreshed = time.monotonic()
                with self._changed:
                    self.members = members
            with self._changed:
                self._requests.fail_starved(self.members, self._leased)
                for requirement in self._requests.open(self.members, self._leased):
                    self._start_thread(requirement)
                self._notices.update(
                    {
                        requirement: self.members.candidates(requirement)
                        for requirement in self._requests.starving(self.members, self._leased)
                    }
                )
                if self._fatal is not None or not (self._queue or self._threads):
                    return
                self._changed.wait(_TICK_S)
            self._expire_overdue()

    def _start_thread(self, requirement: Requirement) -> None:
        thread = threading.Thread(target=self._work, args=(requirement,), daemon=True)
        self._threads.add(thread)
        thread.start()

    def _fail(self, cells: Sequence[Cell], error: HarnessError) -> None:
        """Fail waiting cells that will get no device."""
        self._queue.remove(cells)
        self._log.fail_without_device(cells, error)

    # The thread of a device

    def _work(self, requirement: Requirement) -> None:
        try:
            lease = self._acquire(requirement)
            if lease is not None:
                with lease:
                    self._run_cells(lease, requirement)
        except BaseException as error:  # noqa: BLE001  (the main thread raises it)
            # A lease that is lost, or cannot be given back in order, costs no result.
            if not isinstance(error, PoolError) or error.ends_plan:
                with self._changed:
                    self._fatal = self._fatal or error
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _acquire(self, requirement: Requirement) -> Lease | None:
        """Wait for a lease; `None` if there is nothing left to do for it."""
        try:
            lease = self._pool.acquire(
                requirement,
                purpose=self._purpose,
                cancelled=lambda: not self._is_needed(requirement),
            )
        except LeaseTimeoutError:
            return None
        except RequirementError as error:
            with self._changed:
                self._requests.reject(requirement, error)
                self._changed.wait(_TICK_S)  # so that a request by name is not repeated sooner
            return None
        else:
            with self._changed:
                self._leased[lease.device.member] = None
            return lease
        finally:
            with self._changed:
                self._requests.close(requirement)
                self._changed.notify_all()

    def _is_needed(self, request: Requirement) -> bool:
        """Return whether a request, by name or not, is still worth waiting for."""
        with self._changed:
            if self._is_stopping:
                return False
            if self._requests.should_yield(request, self.members, self._leased):
                return False
            return any(serves(request, other) for other, _ in self._queue.requirements())

    def _run_cells(self, lease: Lease, requirement: Requirement) -> None:
        member = lease.device.member
        affinity = ""
        try:
            while (cell := self._take(member, requirement, affinity)) is not None:
                affinity = cell.affinity
                if not self._run_cell(cell, lease):
                    return
        finally:
            with self._changed:
                del self._leased[member]

    def _take(self, member: str, leased_as: Requirement, affinity: str) -> Cell | None:
        with self._changed:
            if self._is_stopping:
                return None
            cell = self._queue.take(
                lambda requirement: self.members.fits(member, leased_as, requirement),
                lambda cell: self._placement.allows(cell, member),
                affinity=affinity,
                devices=len(self._leased),
            )
            if cell is not None:
                self._placement.assign(cell, member)
            return cell

    def _run_cell(self, cell: Cell, lease: Lease) -> bool:
        """Try a cell; return whether the lease is still good for the next."""
        member = lease.device.member
        attempt = Attempt(cell, lease.device)
        with self._changed:
            self._leased[member] = attempt
            if self._is_stopping:
                attempt.cancel.interrupt()
        self._log.start(attempt)
        try:
            result = self._runner.run(cell, lease.device, attempt.cancel)
        except CellInterrupted:
            self._log.interrupt(attempt)
            return False
        except QnnfarmError as error:
            if isinstance(error, HarnessError) and error.ends_plan:
                raise
            return self._handle_failure(attempt, lease, error)
        finally:
            with self._changed:
                self._leased[member] = None
        with self._changed:
            self._queue.learn(cell, attempt.elapsed_s())
        self._log.finish(attempt, result)
        lease.report_success(attempt.work)
        return True

    def _handle_failure(self, attempt: Attempt, lease: Lease, error: Exception) -> bool:
        cell = attempt.cell
        blame = lease.report(error, attempt.work) if isinstance(error, HarnessError) else ""
        outcome = self._log.failure_outcome(attempt, error, blame)
        failure = outcome.failures[-1][1]
        tries = sum(past.kind is failure.kind for _, past in outcome.failures)
        lost = failure.kind is FailureClass.LEASE
        if lost and self._is_stopping:
            self._log.interrupt(attempt)
        elif tries <= cell.retries.of(failure.kind) and not (blame or self._is_stopping):
            self._log.retry(outcome)
            with self._changed:
                self._placement.unassign(cell, lease.device.member)
                if not lost:  # it is better tried elsewhere
                    self._placement.exclude(cell, lease.device.member)
                self._queue.put(cell)
                self._changed.notify_all()
        else:
            self._log.end(outcome)
        return failure.kind in {FailureClass.OUTPUT, FailureClass.USE}

    # The end

    def _expire_overdue(self) -> None:
        with self._changed:
            overdue = [a for a in self._leased.values() if a is not None and a.is_overdue()]
            for attempt in overdue:
                attempt.is_expiring = True
        for attempt in overdue:
            threading.Thread(target=attempt.expire, daemon=True).start()

    def _stop(self, *, notify: bool) -> None:
        """Begin no more cells, and end those that run."""
        with self._changed:
            self._is_stopping = True
            attempts = [attempt for attempt in self._leased.values() if attempt is not None]
            self._changed.notify_all()
        if notify:
            self._observer.on_stop()
        for attempt in attempts:
            threading.Thread(target=attempt.cancel.interrupt, daemon=True).start()

    def _wait_for_threads(self) -> None:
        with self._changed:
            while any(thread.is_alive() for thread in self._threads):
                self._changed.wait(_TICK_S)
