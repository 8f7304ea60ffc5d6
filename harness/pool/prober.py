"""Prober that asks many devices at once who they are."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from harness.errors import HarnessError, one_line
from harness.pool.ledger import DeviceRecords
from harness.pool.members import Member, Members
from harness.pool.opener import Opener, identify

_NOTICE_AFTER_S = 2.0
_ANSWER_S = 30.0
_MAX_THREADS = 16
_MAX_NAMES = 6


class Prober:
    """Asks devices who they are, and records the answers.

    Args:
        on_progress: called with the names of slow devices, once probing takes two seconds.
    """

    def __init__(
        self,
        members: Members,
        records: DeviceRecords,
        opener: Opener,
        on_progress: Callable[[str], None],
    ) -> None:
        self._members = members
        self._records = records
        self._opener = opener
        self._on_progress = on_progress

    def probe(self, members: Sequence[Member]) -> None:
        """Ask each device; one that does not answer is absent."""
        if not members:
            return
        with ThreadPoolExecutor(min(len(members), _MAX_THREADS)) as threads:
            keys = {member.name: threads.submit(self._probe_one, member) for member in members}
            try:
                wait(keys.values(), timeout=_NOTICE_AFTER_S)
                if slow := [name for name, key in keys.items() if not key.done()]:
                    self._on_progress(_slow_notice(slow))
                for name, key in keys.items():
                    self._members.set_key(name, key.result())
            finally:  # after Ctrl-C, devices that were not asked yet stay unasked
                threads.shutdown(wait=False, cancel_futures=True)

    def _probe_one(self, member: Member) -> str:
        """Probe a device and return its key in the ledger."""
        spec = str(member.spec)
        try:
            reached = identify(member, self._opener.open(member), timeout_s=_ANSWER_S)
        except HarnessError as error:
            return self._records.record_absent(member.name, spec, one_line(str(error)))
        self._records.record_found(reached.key, member.name, spec, reached.facts)
        return reached.key


def _slow_notice(slow: Sequence[str]) -> str:
    names = ", ".join(one_line(name, 80) for name in slow[:_MAX_NAMES])
    more = f" and {len(slow) - _MAX_NAMES} more" if len(slow) > _MAX_NAMES else ""
    return f"looking for {names}{more}: a device has {_ANSWER_S:g} s to answer"
