"""Progress of long work: which stages run, and how far each is.

    with telling(print):
        with working("export my-model"):
            tell("layer 3/24")

Work tells of itself wherever it is done; who wants to hear of it says so around a build. Threads of
a build's tasks tell the listener of the thread that started them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class WorkNote(NamedTuple):
    """Statement about some work.

    Attributes:
        name: of the work, such as `export my-model`.
        words: how far it is; empty at its beginning.
        ended: whether it has ended.
    """

    name: str
    words: str = ""
    ended: bool = False


Listener = Callable[[WorkNote], None]
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)
_NAME: ContextVar[str] = ContextVar("work", default="")


@contextmanager
def telling(listener: Listener) -> Iterator[None]:
    """Let a listener hear of all work in the block; work in several threads calls it at once."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def working(name: str) -> Iterator[None]:
    """Give what is done in the block a name, and tell of its beginning and its end."""
    token = _NAME.set(name)
    _say(WorkNote(name))
    try:
        yield
    finally:
        _say(WorkNote(name, ended=True))
        _NAME.reset(token)


def tell(words: str) -> None:
    """Say how far the work of this thread is, such as `layer 3/24, window 2/8`."""
    if name := _NAME.get():
        _say(WorkNote(name, words))


def _say(work: WorkNote) -> None:
    listener = _LISTENER.get()
    if listener is not None:
        listener(work)
