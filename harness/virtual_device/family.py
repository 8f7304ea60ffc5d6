"""All processes below this one and whose they are, looked at once for all devices here.

Looking means reading all of `/proc`. With hundreds of devices that look ten times a second each,
they have to share what one of them has seen.
"""

import os
import time
from collections import defaultdict

from harness.virtual_device.procfs import ProcessStat, descendants, environment_of


class Family:
    """Belongs to one event loop.

    A process is its owner's that was started for that owner, that is below one of those, or in
    whose environment the owner's mark is: a daemon may have shed the first two.

    Args:
        variable: the environment variable whose value is the mark.
    """

    def __init__(self, variable: str) -> None:
        self._prefix = f"{variable}=".encode()
        self._started: dict[int, str] = {}
        self._marks: dict[tuple[int, int], str] = {}
        self._seen: list[ProcessStat] = []
        self._owned: dict[str, list[ProcessStat]] = {}
        self._seen_at = float("-inf")
        self._ended: set[int] = set()

    def started(self, pid: int, owner: str) -> None:
        """A process was started for that owner, whose mark this is."""
        self._started[pid] = owner

    def ended(self, pid: int) -> None:
        """A process has been waited for."""
        self._started.pop(pid, None)
        self._ended.add(pid)

    def all(self, max_age_s: float = 0.0) -> list[ProcessStat]:
        """All, zombies included, parents before children; as they were so long ago at most."""
        self._look(max_age_s)
        return [process for process in self._seen if process.pid not in self._ended]

    def of(self, owner: str, max_age_s: float = 0.0) -> list[ProcessStat]:
        """Those of one owner, as `all` gives them."""
        self._look(max_age_s)
        owned = self._owned.get(owner, [])
        return [process for process in owned if process.pid not in self._ended]

    def _look(self, max_age_s: float) -> None:
        now = time.monotonic()
        if now - self._seen_at < max_age_s:
            return
        self._seen, self._seen_at = descendants(os.getpid()), now
        self._ended.clear()
        owners: dict[int, str] = {}
        owned: dict[str, list[ProcessStat]] = defaultdict(list)
        marks: dict[tuple[int, int], str] = {}
        for process in self._seen:
            name = (process.pid, process.started)
            owner = self._started.get(process.pid) or owners.get(process.parent)
            owner = owner or self._marks.get(name) or self._mark(process.pid)
            if owner:
                owners[process.pid] = marks[name] = owner
                owned[owner].append(process)
        self._owned, self._marks = owned, marks

    def _mark(self, pid: int) -> str:
        for variable in environment_of(pid):
            if variable.startswith(self._prefix):
                return variable.removeprefix(self._prefix).decode("utf-8", "replace")
        return ""
