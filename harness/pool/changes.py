"""Telling the threads of a process that something may have become free."""

import threading


class Changes:
    """Counts what happened, so that who looked before it and waits after it does not miss it."""

    def __init__(self) -> None:
        self._happened = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """How many there were."""
        return self._count

    def notify(self) -> None:
        """There is one more."""
        with self._happened:
            self._count += 1
            self._happened.notify_all()

    def wait_beyond(self, count: int, timeout_s: float) -> bool:
        """Wait until there are more than `count`; whether there are."""
        with self._happened:
            return self._happened.wait_for(lambda: self._count > count, timeout_s)
