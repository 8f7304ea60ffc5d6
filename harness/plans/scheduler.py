"""Cells onto leased devices: a thread for each device in use, one queue for all of them."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.errors import (
    FailureClass,
    HarnessError,
    JournalError,
    LeaseTimeoutError,
    LedgerError,
    NewerSchemaError,
    NotAStoreError,
    OlderSchemaError,
    PoolError,
    RequirementError,
    StoreLockedError,
    StoreUnavailableError,
    one_line,
)
from harness.plans.cancellation import CellInterrupted
from harness.plans.cell_queue import CellQueue, Durations
from harness.plans.cells import Cell
from harness.plans.journal import Journal
from harness.plans.lease_requests import Asking, Members, Placement, serves
from harness.plans.outcome import CellOutcome, CellResult, Summary
from harness.plans.outcome_log import Attempt, Tally
from harness.plans.protocols import CellRunner, DevicePool, Lease, Observer, Silent
from harness.plans.wait_notices import WaitingNotices
from harness.pool.owner import this_process
from harness.pool.requirement import Requirement

_TICK_S = 0.5
_FATAL = (
    JournalError, LedgerError, NewerSchemaError, NotAStoreError, OlderSchemaError,
    StoreLockedError, StoreUnavailableError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatrixOptions:
    """How a matrix is run.

    Attributes:
        max_parallel: at most so many devices at once; `None` for no limit.
        lease_s: for how long cells wait while no device at all is free for them.
        purpose: what the pool shows as the use of its devices.
    """

    max_parallel: int | None = None
    lease_s: float = 3600.0
    purpose: str = "qnnfarm run"


def run_matrix(
    cells: Sequence[Cell],
    pool: DevicePool,
    runner: CellRunner,
    journal: Journal,
    *,
    options: MatrixOptions | None = None,
    observer: Observer | None = None,
    finished: Callable[[Cell], CellResult | None] = lambda _: None,
) -> Summary:
    """Run all cells; those that are finished already are not run again.

    A KeyboardInterrupt in this thread ends the run: nothing is begun any more, what runs is ended
    on its device, leases are given back, and the summary says what is left. A second one is
    passed on at once.

    Args:
        journal: is open, and has begun the plan.
        finished: what an earlier run of the plan got from a cell; `None` if it must be run.

    Raises:
        JournalError, StoreError, LedgerError: what happens cannot be kept, so all ends.
    """
    outcomes: dict[str, CellOutcome] = {}
    waiting: list[Cell] = []
    for cell in cells:
        result, known = finished(cell), journal.remembered(cell.key)
        if result is None:
            outcomes[cell.key] = CellOutcome(cell)
            waiting.append(cell)
        else:
            device = known.device if known else ""
            outcomes[cell.key] = CellOutcome(
                cell, "done", resumed=True, device=device, result=result
            )
    durations = Durations(cells, lambda cell: journal.expected_s(cell.key, cell.group))
    queue = CellQueue(waiting, durations)
    observer = observer or Silent()
    tally = Tally(outcomes, journal, observer)
    matrix = _Matrix(queue, tally, pool, runner, options or MatrixOptions(), observer)
    began = time.monotonic()
    interrupted = matrix.run()
    return Summary(tally.outcomes, time.monotonic() - began, interrupted)


class _Matrix:
    """The state of one run. All that changes is guarded by `_changed`."""

    def __init__(
        self,
        queue: CellQueue,
        tally: Tally,
        pool: DevicePool,
        runner: CellRunner,
        options: MatrixOptions,
        observer: Observer,
    ) -> None:
        self._queue = queue
        self._tally = tally
        self._pool = pool
        self._runner = runner
        self._purpose = options.purpose
        self._observer = observer
        own = f"{this_process().label}: {one_line(self._purpose, 120)}"
        self._notices = WaitingNotices(observer, own=own)
        self._changed = threading.Condition()
        self._members = Members(())
        self._placement = Placement()
        self._asking = Asking(
            queue,
            self._placement,
            self._fail,
            max_parallel=options.max_parallel,
            lease_s=options.lease_s,
        )
        self._held: dict[str, Attempt | None] = {}
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        self._fatal: BaseException | None = None

    def run(self) -> bool:
        """Run all that waits; gives whether it was interrupted."""
        interrupted = False
        try:
            self._loop()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._stop(tell=interrupted)
            self._wait_for_threads()
        if self._fatal is not None:
            raise self._fatal
        return interrupted

    def _loop(self) -> None:
        refreshed = float("-inf")
        while True:
            if self._queue and time.monotonic() - refreshed >= 1.0:
                members = Members(self._pool.members())
                refreshed = time.monotonic()
                with self._changed:
                    self._members = members
            with self._changed:
                self._asking.give_up(self._members, self._held)
                for requirement in self._asking.requests(self._members, self._held):
                    self._start(requirement)
                self._notices.look(
                    {
                        wanted: self._members.would_do(wanted)
                        for wanted in self._asking.starving(self._members, self._held)
                    }
                )
                if self._fatal is not None or not (self._queue or self._threads):
                    return
                self._changed.wait(_TICK_S)
            self._expire_overdue()

    def _start(self, requirement: Requirement) -> None:
        thread = threading.Thread(target=self._work, args=(requirement,), daemon=True)
        self._threads.add(thread)
        thread.start()

    def _fail(self, cells: Sequence[Cell], error: HarnessError) -> None:
        """Cells that wait will get no device."""
        self._queue.remove(cells)
        self._tally.without_device(cells, error)

    # A thread for a device

    def _work(self, requirement: Requirement) -> None:
        try:
            lease = self._acquire(requirement)
            if lease is not None:
                with lease:
                    self._serve(lease, requirement)
        except BaseException as error:  # noqa: BLE001  (the main thread raises it)
            # A lease that is lost, or cannot be given back in order, costs no result.
            if not isinstance(error, PoolError) or isinstance(error, _FATAL):
                with self._changed:
                    self._fatal = self._fatal or error
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _acquire(self, requirement: Requirement) -> Lease | None:
        """A lease, unless there is nothing to do for it any more."""
        try:
            lease = self._pool.acquire(
                requirement,
                purpose=self._purpose,
                cancelled=lambda: not self._is_wanted(requirement),
            )
        except LeaseTimeoutError:
            return None
        except RequirementError as error:
            with self._changed:
                self._asking.refused(requirement, error)
                self._changed.wait(_TICK_S)  # one that asked by name asks no sooner
            return None
        else:
            with self._changed:
                self._held[lease.device.member] = None
            return lease
        finally:
            with self._changed:
                self._asking.answered(requirement)
                self._changed.notify_all()

    def _is_wanted(self, asked: Requirement) -> bool:
        """Whether what is asked of the pool, by name or not, is still worth waiting for."""
        with self._changed:
            if self._stopping or self._asking.gives_way(asked, self._members, self._held):
                return False
            return any(serves(asked, wanted) for wanted, _ in self._queue.requirements())

    def _serve(self, lease: Lease, requirement: Requirement) -> None:
        member = lease.device.member
        affinity = ""
        try:
            while (cell := self._take(member, requirement, affinity)) is not None:
                affinity = cell.affinity
                if not self._try(cell, lease):
                    return
        finally:
            with self._changed:
                del self._held[member]

    def _take(self, member: str, leased_as: Requirement, affinity: str) -> Cell | None:
        with self._changed:
            if self._stopping:
                return None
            cell = self._queue.take(
                lambda requirement: self._members.fits(member, leased_as, requirement),
                lambda cell: self._placement.allows(cell, member),
                affinity=affinity,
                devices=len(self._held),
            )
            if cell is not None:
                self._placement.given(cell, member)
            return cell

    def _try(self, cell: Cell, lease: Lease) -> bool:
        """Try a cell; gives whether the lease is still good for the next."""
        member = lease.device.member
        attempt = Attempt(cell, lease.device)
        with self._changed:
            self._held[member] = attempt
            if self._stopping:
                attempt.guard.interrupt()
        self._tally.begun(attempt)
        try:
            result = self._runner.run(cell, lease.device, attempt.guard)
        except CellInterrupted:
            self._tally.interrupted(attempt)
            return False
        except Exception as error:
            if isinstance(error, _FATAL) or not isinstance(getattr(error, "exit_code", None), int):
                raise
            return self._failed_try(attempt, lease, error)
        finally:
            with self._changed:
                self._held[member] = None
        with self._changed:
            self._queue.learn(cell, attempt.elapsed_s())
        self._tally.done(attempt, result)
        return True

    def _failed_try(self, attempt: Attempt, lease: Lease, error: Exception) -> bool:
        cell = attempt.cell
        outcome = self._tally.with_failure(attempt, error)
        failure = outcome.failures[-1][1]
        tries = sum(past.kind is failure.kind for _, past in outcome.failures)
        if tries <= cell.retries.of(failure.kind) and not self._stopping:
            self._tally.retried(outcome)
            with self._changed:
                self._placement.failed(cell, lease.device.member)
                self._queue.put(cell)
                self._changed.notify_all()
        else:
            self._tally.failed(outcome)
        if isinstance(error, HarnessError):
            lease.report(error)
        return failure.kind in {FailureClass.OUTPUT, FailureClass.USE}

    # The end

    def _expire_overdue(self) -> None:
        with self._changed:
            overdue = [a for a in self._held.values() if a is not None and a.is_overdue()]
            for late in overdue:
                late.expired = True
        for late in overdue:
            threading.Thread(target=late.expire, daemon=True).start()

    def _stop(self, *, tell: bool) -> None:
        """Begin nothing any more, and end on their devices the cells that run."""
        with self._changed:
            self._stopping = True
            running = [a for a in self._held.values() if a is not None]
            self._changed.notify_all()
        if tell:
            self._observer.stopping()
        for current in running:
            threading.Thread(target=current.guard.interrupt, daemon=True).start()

    def _wait_for_threads(self) -> None:
        with self._changed:
            while any(thread.is_alive() for thread in self._threads):
                self._changed.wait(_TICK_S)
