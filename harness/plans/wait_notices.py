"""Notices why cells wait: once a reason has lasted, and again once another one has."""

import time
from collections.abc import Mapping, Sequence

from harness.plans.protocols import Observer
from harness.pool.requirement import (
    MemberStatus,
    Requirement,
    WaitReasons,
    describe_wait,
    wait_reasons,
)

NOTICE_AFTER_S = 2.0
"""Shorter waits are not worth a line."""


class WaitNotices:
    """Tells an observer why cells get no device. Not thread-safe.

    A reason is told once it has lasted, and again once another reason has.

    Args:
        own: how the pool shows a device that this run holds.
    """

    def __init__(
        self, observer: Observer, *, own: str = "", after_s: float = NOTICE_AFTER_S
    ) -> None:
        self._own = own
        self._observer = observer
        self._after_s = after_s
        self._since: dict[Requirement, float] = {}
        self._reported: dict[Requirement, WaitReasons] = {}
        self._pending: dict[Requirement, tuple[WaitReasons, float]] = {}

    def update(self, starving: Mapping[Requirement, Sequence[MemberStatus]]) -> None:
        """Report the notices that are due now.

        Args:
            starving: requirements of cells without any device, with the devices that would do.
        """
        at = time.monotonic()
        for over in self._since.keys() - starving.keys():
            del self._since[over]
            self._pending.pop(over, None)
            if self._reported.pop(over, None) is not None:
                self._observer.on_wait(str(over), "")
        for requirement, members in starving.items():
            if at - self._since.setdefault(requirement, at) < self._after_s:
                continue
            current = wait_reasons(members, self._reported.get(requirement, frozenset()))
            if self._is_news(requirement, current, at):
                self._reported[requirement] = current
                self._observer.on_wait(str(requirement), describe_wait(members, own=self._own))

    def _is_news(self, requirement: Requirement, current: WaitReasons, at: float) -> bool:
        """Return whether the reasons differ from the reported ones, and have lasted."""
        if requirement not in self._reported:
            return True
        if self._reported[requirement] == current:
            self._pending.pop(requirement, None)
            return False
        before, since = self._pending.get(requirement, (current, at))
        if before != current:
            since = at
        self._pending[requirement] = (current, since)
        return at - since >= self._after_s
