"""A pool and a journal in memory and a runner by hand: the scheduler's seams, without devices."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import cast

from buildlib.closeable import Closeable
from harness.devices.spec import DeviceSpec
from harness.errors import HarnessError, LeaseTimeoutError, RequirementError
from harness.plans.cancellation import CancelToken
from harness.plans.cells import Cell, make_cell
from harness.plans.journal import CellEnd
from harness.plans.lease_requests import meets
from harness.plans.outcome import CellOutcome, CellResult, Summary
from harness.plans.plan_file import Retries
from harness.pool.failure_policy import Work
from harness.pool.lease import Lease, LeasedDevice
from harness.pool.requirement import MemberStatus, Requirement
from harness.pool.states import MemberState
from harness.workloads.command import Command


class HandClock:
    """The clock by which cells wait for devices, turned by hand; it knows when it is looked at.

    Attributes:
        step: how far each look turns it.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.step = 0.0
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        self.time += self.step
        return self.time

    def turn(self, seconds: float) -> None:
        """Let time pass once the scheduler has looked, from beginning to end, at how it stands."""
        before = self._looks
        while self._looks < before + 2:
            time.sleep(0.01)
        self.time += seconds


class HandJournal:
    """What became of each cell, in memory; a `Recorder`."""

    def __init__(self) -> None:
        self.ends: dict[str, CellEnd] = {}

    def record_start(self, key: str, device: str) -> None:
        self.ends[key] = CellEnd("begun", device=device)

    def record_ends(self, outcomes: Sequence[CellOutcome]) -> None:
        self.ends.update({outcome.cell.key: CellEnd.of(outcome) for outcome in outcomes})


class HandDevice:
    """Only what the scheduler itself asks of a device: who it is."""

    def __init__(self, member: str) -> None:
        self.member = member
        self.serial = f"serial-of-{member}"


class HandLease(Closeable):
    def __init__(self, pool: "HandPool", member: str) -> None:
        self._pool = pool
        self.device = cast("LeasedDevice", HandDevice(member))

    def report(self, failure: HarnessError, work: Work | None = None) -> str:
        self._pool.reports.append((self.device.member, type(failure).__name__))
        assert work is not None
        if work.id not in self._pool.blamed:
            return ""
        earlier = self._pool.failed.setdefault(work.id, [])
        earlier.append(self.device.member)
        elsewhere = [member for member in earlier if member != self.device.member]
        return f"it fails alike on {elsewhere[0]}" if elsewhere else ""

    def report_success(self, work: Work) -> None:
        self._pool.ended_well.append(work.label)

    def close(self) -> None:
        self._pool.give_back(self.device.member)


class HandPool:
    """First come first served is left to the real one; here it is only never twice."""

    def __init__(
        self,
        members: Sequence[MemberStatus],
        *,
        away: Collection[str] = (),
        refused: Collection[str] = (),
    ) -> None:
        self._members = {member.name: member for member in members}
        self._away = away
        self._refused = refused
        self._held: set[str] = set()
        self._changed = threading.Condition()
        self.reports: list[tuple[str, str]] = []
        self.blamed: set[str] = set()
        self.failed: dict[str, list[str]] = {}
        self.ended_well: list[str] = []
        self.leases = 0
        self.purposes: set[str] = set()
        self.most_held = 0

    @property
    def held(self) -> set[str]:
        return set(self._held)

    def members(self) -> list[MemberStatus]:
        return list(self._members.values())

    def acquire(
        self, requirement: Requirement, *, purpose: str = "", cancelled: Callable[[], bool]
    ) -> Lease:
        wanted = [
            m.name
            for m in self._members.values()
            if meets(requirement, m) and m.name not in self._refused
        ]
        if not wanted:
            raise RequirementError(str(requirement), "none is such")
        began = time.monotonic()
        with self._changed:
            while not (free := [n for n in wanted if n not in self._held and n not in self._away]):
                if cancelled():
                    waited_s = time.monotonic() - began
                    raise LeaseTimeoutError(str(requirement), waited_s, "all are held")
                self._changed.wait(0.02)
            self._held.add(free[0])
            self.leases += 1
            self.purposes.add(purpose)
            self.most_held = max(self.most_held, len(self._held))
            return cast("Lease", HandLease(self, free[0]))

    def give_back(self, member: str) -> None:
        with self._changed:
            self._held.remove(member)
            self._changed.notify_all()


def members(
    *names: str, soc: str = "SM8750", tags: frozenset[str] = frozenset()
) -> list[MemberStatus]:
    return [
        MemberStatus(name, DeviceSpec("android", name), tags, MemberState.READY, "", 0.0, soc=soc)
        for name in names
    ]


def cells(
    count: int,
    requirement: Requirement | None = None,
    *,
    container: str = "",
    retries: Retries | None = None,
    timeout_s: float = 3600.0,
    first: int = 0,
) -> list[Cell]:
    return [
        make_cell(
            f"cell-{container}{number}",
            Command(command=("echo", str(number))),
            requirement or Requirement(),
            container_sha256=container,
            retries=retries,
            timeout_s=timeout_s,
        )
        for number in range(first, first + count)
    ]


class HandRunner:
    """Runs `action(cell, member, cancel)`; sees to it that no device has two cells at once."""

    def __init__(
        self, action: Callable[[Cell, str, CancelToken], object] = lambda *_: None
    ) -> None:
        self._action = action
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self.ran: list[tuple[str, str]] = []
        self.collisions = 0

    @property
    def tries(self) -> Counter[str]:
        return Counter(label for label, _ in self.ran)

    def run(self, cell: Cell, device: LeasedDevice, cancel: CancelToken) -> CellResult:
        member = device.member
        with self._lock:
            self.collisions += member in self._busy
            self._busy.add(member)
            self.ran.append((cell.label, member))
        try:
            self._action(cell, member, cancel)
        finally:
            with self._lock:
                self._busy.discard(member)
        return CellResult(summary=f"{cell.label} ran")


def statuses(summary: Summary) -> dict[str, str]:
    return {outcome.cell.label: outcome.status for outcome in summary.outcomes}
