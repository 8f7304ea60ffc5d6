"""Cells onto leased devices: a thread for each device in use, one queue for all of them."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.errors import (
    HarnessError,
    JournalError,
    LeaseTimeoutError,
    LedgerError,
    NewerSchemaError,
    NoDeviceForCellError,
    NotAStoreError,
    OlderSchemaError,
    PoolError,
    RequirementError,
    StoreLockedError,
    StoreUnavailableError,
)
from harness.plans.cell_queue import CellQueue, expectations
from harness.plans.cells import Cell
from harness.plans.eligibility import Members
from harness.plans.guard import CellInterrupted, Guard
from harness.plans.journal import Journal
from harness.plans.outcome import (
    CellOutcome,
    CellResult,
    CellStatus,
    Failure,
    FailureClass,
    Summary,
)
from harness.plans.placement import Placement
from harness.plans.seams import CellRunner, DevicePool, Lease, LeasedDevice, Observer, Silent
from harness.pool.base import Requirement

_TICK_S = 0.5
_MOST_ASKING = 16
"""100 devices of one host are leased as fast by 16 at once as by 32, and slower by 4."""
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
    queue = CellQueue(
        waiting, expectations(waiting, lambda cell: journal.expected_s(cell.key, cell.group))
    )
    matrix = _Matrix(
        queue, outcomes, pool, runner, journal, options or MatrixOptions(), observer or Silent()
    )
    began = time.monotonic()
    interrupted = matrix.run()
    return Summary(tuple(outcomes.values()), time.monotonic() - began, interrupted)


@dataclass(slots=True)
class _Try:
    """A cell on its device."""

    cell: Cell
    device: LeasedDevice
    guard: Guard
    began: float
    expired: bool = False

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def expire(self) -> None:
        action = f"cell {self.cell.label}"
        self.guard.expire(self.device.serial, action, self.cell.timeout_s)


class _Matrix:
    """The state of one run. All that changes is guarded by `_changed`."""

    def __init__(
        self,
        queue: CellQueue,
        outcomes: dict[str, CellOutcome],
        pool: DevicePool,
        runner: CellRunner,
        journal: Journal,
        options: MatrixOptions,
        observer: Observer,
    ) -> None:
        self._queue = queue
        self._outcomes = outcomes
        self._pool = pool
        self._runner = runner
        self._journal = journal
        self._options = options
        self._observer = observer
        self._changed = threading.Condition()
        self._members = Members(())
        self._placement = Placement()
        self._asking: Counter[Requirement] = Counter()
        self._held: dict[str, _Try | None] = {}
        self._threads: set[threading.Thread] = set()
        self._without_device: dict[Requirement, float] = {}
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
                self._give_up_waiting()
                self._ask_for_devices()
                if self._fatal is not None or not (self._queue or self._threads):
                    return
                self._changed.wait(_TICK_S)
            self._expire_overdue()

    # Asking for devices

    def _ask_for_devices(self) -> None:
        for requirement, count in self._queue.requirements():
            names = self._members.meeting(requirement)
            free = [name for name in self._members.usable(names) if name not in self._held]
            serving = any(name in self._held for name in names)
            bound = all(map(self._placement.is_bound, self._queue.waiting(requirement)))
            if bound and names:
                self._ask_by_name(requirement, names, free)
                continue
            wanted = min(count, max(len(free), 0 if serving else 1))
            while self._asking[requirement] < wanted and self._may_ask():
                self._start(requirement)

    def _ask_by_name(
        self, requirement: Requirement, names: Sequence[str], free: Sequence[str]
    ) -> None:
        """For cells that may not go onto just any device: again, or spread over devices."""
        for cell in list(self._queue.waiting(requirement)):
            if self._placement.is_exhausted(cell, names):
                reason = f"all {len(names)} have another replica of the cell: lower its `count`"
                self._fail([cell], RequirementError(str(requirement), reason))
                continue
            self._placement.relax(cell, names)
            for name in free:
                if not self._may_ask():
                    return
                named = replace(requirement, name=name)
                if self._placement.allows(cell, name) and not self._asking[named]:
                    self._start(named)
                    break

    def _may_ask(self) -> bool:
        most = self._options.max_parallel
        asking = self._asking.total()
        return asking < _MOST_ASKING and (most is None or asking + len(self._held) < most)

    def _start(self, requirement: Requirement) -> None:
        self._asking[requirement] += 1
        thread = threading.Thread(target=self._work, args=(requirement,), daemon=True)
        self._threads.add(thread)
        thread.start()

    def _give_up_waiting(self) -> None:
        """Cells for which no device at all could be had for too long have failed."""
        at = time.monotonic()
        waiting = [requirement for requirement, _ in self._queue.requirements()]
        for served in self._without_device.keys() - set(waiting):
            del self._without_device[served]  # what waits again later begins to wait then
        for requirement in waiting:
            if any(name in self._held for name in self._members.meeting(requirement)):
                self._without_device.pop(requirement, None)
                continue
            since = self._without_device.setdefault(requirement, at)
            if at - since >= self._options.lease_s:
                error = NoDeviceForCellError(str(requirement), self._options.lease_s)
                self._fail(list(self._queue.waiting(requirement)), error)

    def _fail(self, cells: Sequence[Cell], error: HarnessError) -> None:
        """Cells that wait will get no device."""
        self._queue.remove(cells)
        self._end(*(self._failed(cell, "", error) for cell in cells))

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
                purpose=self._options.purpose,
                cancelled=lambda: not self._is_wanted(requirement),
            )
        except LeaseTimeoutError:
            return None
        except RequirementError as error:
            with self._changed:
                self._fail(list(self._queue.waiting(requirement)), error)
                self._changed.wait(_TICK_S)  # one that asked by name asks no sooner
            return None
        else:
            with self._changed:
                self._held[lease.device.member] = None
            return lease
        finally:
            with self._changed:
                self._asking[requirement] -= 1
                self._changed.notify_all()

    def _is_wanted(self, asked: Requirement) -> bool:
        """Whether a cell waits for what is asked of the pool, by name or not."""
        with self._changed:
            waiting = [] if self._stopping else self._queue.requirements()
        return any(asked in {wanted, replace(wanted, name=asked.name)} for wanted, _ in waiting)

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
        current = _Try(cell, lease.device, Guard(), time.monotonic())
        with self._changed:
            self._held[member] = current
            if self._stopping:
                current.guard.interrupt()
        self._journal.cell_begun(cell.key, member)
        self._observer.cell_begun(cell, member)
        try:
            result = self._runner.run(cell, lease.device, current.guard)
        except CellInterrupted:
            self._end(self._ended(current, status="interrupted"))
            return False
        except Exception as error:
            if isinstance(error, _FATAL) or not isinstance(getattr(error, "exit_code", None), int):
                raise
            return self._failed_try(current, lease, error)
        finally:
            with self._changed:
                self._held[member] = None
        self._end(replace(self._ended(current, status="done"), result=result))
        return True

    def _failed_try(self, current: _Try, lease: Lease, error: Exception) -> bool:
        cell, member = current.cell, lease.device.member
        outcome = replace(self._failed(cell, member, error), duration_s=current.elapsed_s())
        failure = outcome.failures[-1][1]
        tries = sum(past.kind is failure.kind for _, past in outcome.failures)
        if tries <= failure.kind.retries(cell.retries) and not self._stopping:
            self._observer.cell_retried(cell, member, failure)
            with self._changed:
                self._outcomes[cell.key] = replace(outcome, status="left")
                self._placement.failed(cell, member)
                self._queue.put(cell)
                self._changed.notify_all()
        else:
            self._end(outcome)
        if isinstance(error, HarnessError):
            lease.report(error)
        return failure.kind in {FailureClass.OUTPUT, FailureClass.USE}

    # What became of cells

    def _ended(self, current: _Try, *, status: CellStatus) -> CellOutcome:
        known = self._outcomes[current.cell.key]
        member, elapsed_s = current.device.member, current.elapsed_s()
        return replace(known, status=status, device=member, duration_s=elapsed_s)

    def _failed(self, cell: Cell, member: str, error: Exception) -> CellOutcome:
        known = self._outcomes[cell.key]
        failures = (*known.failures, (member, Failure.of(error, cell.work)))
        return replace(known, status="failed", device=member, failures=failures)

    def _end(self, *outcomes: CellOutcome) -> None:
        self._journal.cells_ended(outcomes)
        with self._changed:
            self._outcomes.update({outcome.cell.key: outcome for outcome in outcomes})
        for outcome in outcomes:
            self._observer.cell_ended(outcome)

    # The end

    def _expire_overdue(self) -> None:
        with self._changed:
            tries = [t for t in self._held.values() if t is not None and not t.expired]
            overdue = [t for t in tries if t.elapsed_s() > t.cell.timeout_s]
            for late in overdue:
                late.expired = True
        for late in overdue:
            threading.Thread(target=late.expire, daemon=True).start()

    def _stop(self, *, tell: bool) -> None:
        """Begin nothing any more, and end on their devices the cells that run."""
        with self._changed:
            self._stopping = True
            running = [t for t in self._held.values() if t is not None]
            self._changed.notify_all()
        if tell:
            self._observer.stopping()
        for current in running:
            threading.Thread(target=current.guard.interrupt, daemon=True).start()

    def _wait_for_threads(self) -> None:
        with self._changed:
            while any(thread.is_alive() for thread in self._threads):
                self._changed.wait(_TICK_S)
