"""What strikes code at every point where it may be struck: a deadline that fails when told to."""

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from harness.clock import Deadline, DeadlineExceeded


class EndsAt(Deadline):
    """A deadline that fails when it is asked for the given time, and does something before."""

    def __init__(
        self,
        ask: int,
        failure: type[BaseException] = DeadlineExceeded,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(120.0)
        self._left = ask
        self._failure = failure
        self._then = then

    def remaining(self) -> float:
        self._left -= 1
        if self._left < 0:
            self._then()
            raise self._failure
        return super().remaining()


FAILURES = pytest.mark.parametrize("failure", [DeadlineExceeded, KeyboardInterrupt])


@contextlib.contextmanager
def recorded_links() -> Iterator[list[socket.socket]]:
    """What connections of this process go over, as they are made."""
    made: list[socket.socket] = []
    real = socket.create_connection

    def create(address: tuple[str, int], timeout: float) -> socket.socket:
        made.append(real(address, timeout))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", create)
        yield made
