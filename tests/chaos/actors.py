"""Processes that play a scene, and what is done to them meanwhile."""

import contextlib
import faulthandler
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from harness.errors import HarnessError

Tell = Callable[[Mapping[str, Any]], None]
Part = Callable[[Tell], None]

_DUMP_S = 1.0


class Actor:
    """A child made by `fork`, which tells what it does, a line each, until it ends.

    This process must have no threads: it is copied as it stands.

    Attributes:
        told: what it said. Its last line says how it ended: `end` is `well`, `error` (with `type`
            and `text`), `interrupted` or `crash` (with `text`); there is none if it was killed.
    """

    def __init__(self, name: str, part: Part, log: Path) -> None:
        self.name = name
        self.told: list[dict[str, Any]] = []
        self.hung = False
        self._log = log
        self._rest = b""
        self._pipe, write = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self.pid = os.fork()
        if not self.pid:
            _play(part, write, log)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(write)
        self._open = True

    @property
    def pipe(self) -> int:
        """Readable when it said something, or ended."""
        return self._pipe

    @property
    def ended(self) -> bool:
        """True if it is gone."""
        return not self._open

    @property
    def end(self) -> dict[str, Any]:
        """Its last line."""
        if self.hung:
            return {"end": "hang", "text": self._log.read_text()[-3000:]}
        last = self.told[-1] if self.told else {}
        return last if "end" in last else {"end": "killed"}

    def signal(self, number: signal.Signals) -> None:
        """Signal it, if it is still there."""
        if self._open:
            os.kill(self.pid, number)

    def read(self) -> None:
        """Take what it said."""
        data = os.read(self._pipe, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.told += [json.loads(line) for line in lines]
        if not data:
            os.close(self._pipe)
            os.waitpid(self.pid, 0)
            self._open = False

    def give_up(self) -> None:
        """It took too long: write down where it is, and end it."""
        self.hung = True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGUSR1)
        time.sleep(_DUMP_S)
        self.signal(signal.SIGKILL)
        while self._open:
            self.read()


def conduct(
    actors: Sequence[Actor], acts: Sequence[tuple[float, Callable[[], None]]], patience_s: float
) -> None:
    """Wait until all have ended; do each act so many seconds from now, if one still plays."""
    began = time.monotonic()
    waiting = sorted(acts, key=lambda act: act[0])
    while playing := [actor for actor in actors if not actor.ended]:
        passed = time.monotonic() - began
        while waiting and waiting[0][0] <= passed:
            waiting.pop(0)[1]()
        if passed > patience_s:
            for actor in playing:
                actor.give_up()
            return
        until = waiting[0][0] if waiting else patience_s
        pipes = [actor.pipe for actor in playing]
        readable, _, _ = select.select(pipes, [], [], max(0.0, until - passed) + 0.001)
        for actor in playing:
            if actor.pipe in readable:
                actor.read()


def _play(part: Part, write: int, log: Path) -> NoReturn:
    """Play, in the child; it never returns."""
    status = 1
    with contextlib.suppress(BaseException):
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(descriptor, 2)
        faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
        signal.signal(signal.SIGTERM, _interrupt)

        def tell(what: Mapping[str, Any]) -> None:
            os.write(write, json.dumps(what).encode() + b"\n")

        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            part(tell)
            tell({"end": "well"})
        except HarnessError as error:
            tell({"end": "error", "type": type(error).__name__, "text": str(error)})
        except KeyboardInterrupt:
            tell({"end": "interrupted"})
        except BaseException as error:  # noqa: BLE001 - whatever it is, the judge is to see it
            if _interrupted(error):
                tell({"end": "interrupted"})
            else:
                tell({"end": "crash", "text": traceback.format_exc()[-3000:]})
        status = 0
    os._exit(status)


def _interrupted(error: BaseException | None) -> bool:
    """Return whether it began with an interrupt, even if a library made it another error."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
