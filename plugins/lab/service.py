"""Work of a worker beside its cells, in threads of its own."""

import threading
from abc import abstractmethod

from buildlib.closeable import Closeable
from harness.errors import StoreError
from plugins.lab.jobs import log


class Service(Closeable):
    """Work that a thread does again and again until it is closed.

    Args:
        every_s: pause between two times; the first one begins at once.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, and wait for the work of this moment."""
        self._is_closing.set()
        self._thread.join()

    @abstractmethod
    def _work(self) -> None:
        """Do it once. A StoreError is logged."""

    def _serve(self) -> None:
        while True:
            try:
                self._work()
            except StoreError as error:
                log.warning("%s", error)
            if self._is_closing.wait(self._every_s):
                return
