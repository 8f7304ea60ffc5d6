"""Notices of what cells wait for: once it has lasted, and again once another reason has."""

import time
from collections.abc import Mapping, Sequence

from harness.plans.protocols import Observer
from harness.pool.requirement import Requirement
from harness.pool.status import MemberStatus, WaitReasons, describe_wait, wait_reasons

AFTER_S = 2.0
"""What takes less is not worth a line."""
_MOST = 8
_NOTHING_TOLD = ""


class WaitingNotices:
    """Tells an observer why cells get no device. Not for several threads.

    Args:
        own: as the pool shows who holds a device under a lease of this run.
    """

    def __init__(self, observer: Observer, *, own: str = "", after_s: float = AFTER_S) -> None:
        self._own = own
        self._observer = observer
        self._after_s = after_s
        self._since: dict[Requirement, float] = {}
        self._told: dict[Requirement, WaitReasons] = {}
        self._other: dict[Requirement, tuple[WaitReasons, float]] = {}
        self._more = _NOTHING_TOLD

    def look(self, starving: Mapping[Requirement, Sequence[MemberStatus]]) -> None:
        """Tell what has to be told now.

        Args:
            starving: what cells wait for without any device, with the devices that would do.
        """
        at = time.monotonic()
        for over in self._since.keys() - starving.keys():
            del self._since[over]
            self._other.pop(over, None)
            if self._told.pop(over, None) is not None:
                self._observer.waiting(str(over), "")
        more = 0
        for wanted, members in starving.items():
            if at - self._since.setdefault(wanted, at) < self._after_s:
                continue
            if wanted not in self._told and len(self._told) >= _MOST:
                more += 1
            elif self._is_news(wanted, found := wait_reasons(members), at):
                self._told[wanted] = found
                self._observer.waiting(str(wanted), describe_wait(members, own=self._own))
        self._tell_of_more(f"{more} more kinds of device" if more else _NOTHING_TOLD)

    def _is_news(self, wanted: Requirement, found: WaitReasons, at: float) -> bool:
        """Whether it is reasons other than those told, and not ones that are over soon."""
        if wanted not in self._told:
            return True
        if self._told[wanted] == found:
            self._other.pop(wanted, None)
            return False
        other, since = self._other.get(wanted, (found, at))
        if other != found:
            since = at
        self._other[wanted] = (found, since)
        return at - since >= self._after_s

    def _tell_of_more(self, words: str) -> None:
        if words == self._more:
            return
        if self._more:
            self._observer.waiting(self._more, "")
        if words:
            self._observer.waiting(words, "none can be had")
        self._more = words
