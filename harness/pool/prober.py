"""Looking for devices, many at once: which of them are there, and who they are."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from harness.errors import HarnessError, one_line
from harness.pool.ledger import Register
from harness.pool.members import Member, Roster
from harness.pool.opening import Opener, survey
from harness.pool.status import Tell

AFTER_S = 2.0
"""What takes less is not worth a line."""
_ANSWER_S = 30.0
_AT_ONCE = 16
_MOST_NAMES = 6


class Lookout:
    """Asks devices who they are, and lets the ledger and the roster know.

    Args:
        tell: told which devices let wait for an answer, once a look lasts.
    """

    def __init__(self, roster: Roster, register: Register, opener: Opener, tell: Tell) -> None:
        self._roster = roster
        self._register = register
        self._opener = opener
        self._tell = tell

    def look(self, members: Sequence[Member]) -> None:
        """Ask them; one that does not answer is absent.

        Raises:
            LedgerError: the ledger cannot be used.
        """
        if not members:
            return
        with ThreadPoolExecutor(min(len(members), _AT_ONCE)) as threads:
            asked = {member.name: threads.submit(self._look_for, member) for member in members}
            try:
                wait(asked.values(), timeout=AFTER_S)
                if slow := [name for name, answer in asked.items() if not answer.done()]:
                    self._tell(_in_words(slow))
                for name, answer in asked.items():
                    self._roster.learn(name, answer.result())
            finally:  # after Ctrl-C nobody wants to know of those that were not asked yet
                threads.shutdown(wait=False, cancel_futures=True)

    def _look_for(self, member: Member) -> str:
        """The key by which the ledger knows it now."""
        spec = str(member.spec)
        try:
            reached = survey(member, self._opener.open(member), timeout_s=_ANSWER_S)
        except HarnessError as error:
            return self._register.register_absent(member.name, spec, one_line(str(error)))
        self._register.register_found(reached.key, member.name, spec, reached.facts)
        return reached.key


def _in_words(slow: Sequence[str]) -> str:
    names = ", ".join(one_line(name, 80) for name in slow[:_MOST_NAMES])
    more = f" and {len(slow) - _MOST_NAMES} more" if len(slow) > _MOST_NAMES else ""
    return f"looking for {names}{more}: a device has {_ANSWER_S:g} s to answer"
