"""Armed faults of a device, their strikes and their effects on it.

Services open an `activity` for each request and await its `transfer` for each packet. Without armed
faults that costs next to nothing.
"""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from plugins.virtual_android.connection import DaemonConnection
from plugins.virtual_android.events import EventLog
from plugins.virtual_android.faults import (
    ALWAYS,
    DSP_MESSAGES,
    Babble,
    Corrupt,
    Drop,
    Dsp,
    Full,
    InjectedFault,
    Power,
    Reboot,
    Runner,
    Slow,
    Stall,
    Throttle,
)
from plugins.virtual_android.heat.throttler import Throttler
from plugins.virtual_android.linux import ProcessStat, command_line, has_mapped, write_stderr
from plugins.virtual_android.power import PowerAction, PowerCommand, PowerQueue
from plugins.virtual_android.processes import ProcessTable, send_signal
from plugins.virtual_android.storage import Storage
from plugins.virtual_android.stream import StreamClosedError
from plugins.virtual_android.userland import Userland

_POLL_S = 0.02

_SHELLS = {"sh", "dash", "bash", "mksh"}


@dataclass(slots=True)
class _Armed:
    fault: InjectedFault
    strikes: int = 0
    passed: int = 0
    files: int = 0

    @property
    def spent(self) -> bool:
        return self.fault.count != ALWAYS and self.strikes >= self.fault.count


class Injector:
    """The armed faults of one device. Belongs to its event loop."""

    def __init__(self, effects: "Effects", events: EventLog) -> None:
        self._effects = effects
        self._events = events
        self._armed: list[_Armed] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._stalls = 0

    @property
    def faults(self) -> tuple[InjectedFault, ...]:
        """Armed faults that can still strike."""
        return tuple(armed.fault for armed in self._armed if not armed.spent)

    @property
    def stalled(self) -> bool:
        """True if a stall holds."""
        return not self._flowing.is_set()

    @property
    def idle(self) -> bool:
        """True if no fault is armed and no stall holds."""
        return not self._armed and self._flowing.is_set()

    def arm(self, fault: InjectedFault) -> None:
        """Arm a fault; a new state replaces one of its kind."""
        self._events.add("armed", str(fault))
        if isinstance(fault, Throttle | Full):
            self._armed = [armed for armed in self._armed if armed.fault.kind != fault.kind]
        self._armed.append(_Armed(fault))
        if isinstance(fault, Throttle):
            self._effects.throttle(fault.factor)
            self._events.add("struck", str(fault))
        elif isinstance(fault, Full):
            self._effects.limit_free(fault.free)

    def clear(self) -> None:
        """Disarm every fault and end every state; destroyed files stay destroyed."""
        for fault in self.faults:
            self._events.add("cleared", str(fault))
        self._armed.clear()
        for task in list(self._tasks):
            task.cancel()
        self._effects.throttle(1.0)
        self._effects.limit_free(None)
        self.release()

    def release(self) -> None:
        """End a stall."""
        if self.stalled:
            self._flowing.set()
            self._effects.resume()

    @contextlib.asynccontextmanager
    async def activity(self, *kinds: str, detail: str = "") -> AsyncIterator["Activity"]:
        """Open an activity, once no fault holds it back."""
        activity = Activity(self, frozenset(kinds), detail)
        try:
            if not self.idle:
                for armed in self._matching(activity):
                    self._schedule(armed, activity)
                await activity.transfer(0)
            yield activity
        finally:
            activity.ended = True

    def full(self, detail: str) -> None:
        """Report that a write was refused for lack of space."""
        for armed in [one for one in self._armed if isinstance(one.fault, Full)]:
            self._strike(armed, detail)
            if armed.spent:
                self._effects.limit_free(None)

    def _matching(self, activity: "Activity") -> Iterable[_Armed]:
        self._armed = [armed for armed in self._armed if not armed.spent]
        for armed in list(self._armed):
            if armed.fault.when == "any" or armed.fault.when in activity.kinds:
                yield armed

    def _strike(self, armed: _Armed, detail: str) -> None:
        armed.strikes += 1
        self._events.add("struck", str(armed.fault), detail)

    def _schedule(self, armed: _Armed, activity: "Activity") -> None:
        fault = armed.fault
        if isinstance(fault, Reboot | Power):
            armed.strikes += 1  # at once, or the next activity would be struck too
            if fault.after:
                self._start(self._go_down_later(fault, activity))
            else:
                self._go_down(fault, activity)  # a task would come after a short command
        elif isinstance(fault, Runner | Dsp):
            self._start(self._strike_runner(armed, fault, activity))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _go_down_later(self, fault: Reboot | Power, activity: "Activity") -> None:
        await asyncio.sleep(fault.after)
        self._go_down(fault, activity)

    def _go_down(self, fault: Reboot | Power, activity: "Activity") -> None:
        self._events.add("struck", str(fault), activity.detail)
        if isinstance(fault, Power):
            self._effects.cut_power(fault.off, fault.unsynced)
        else:
            self._effects.reboot()

    async def _strike_runner(
        self, armed: _Armed, fault: Runner | Dsp, activity: "Activity"
    ) -> None:
        await asyncio.sleep(fault.after)
        while not activity.ended and not armed.spent:
            if activity.pid is not None:
                pids = self._effects.signal_runner(activity.pid, fault)
                if pids:
                    self._strike(armed, f"{activity.detail} pid {' '.join(map(str, pids))}")
                    return
            await asyncio.sleep(_POLL_S)

    async def pass_packet(self, activity: "Activity", count: int) -> None:
        """See `Activity.transfer`."""
        for armed in self._matching(activity):
            fault = armed.fault
            armed.passed += count
            if isinstance(fault, Slow):
                if activity.is_first(armed):
                    self._strike(armed, activity.detail)
                await asyncio.sleep(fault.ms / 1000 + count / fault.rate)
            elif isinstance(fault, Stall) and armed.passed >= fault.bytes:
                armed.passed = 0
                self._strike(armed, activity.detail)
                self._stall(fault.seconds)
            elif isinstance(fault, Drop) and armed.passed >= fault.bytes:
                armed.passed = 0
                self._strike(armed, activity.detail)
                self._effects.drop()
                raise StreamClosedError
        await self._flowing.wait()

    def _stall(self, seconds: float) -> None:
        self._flowing.clear()
        self._effects.stall()
        self._stalls += 1
        if seconds != float("inf"):
            self._start(self._release_after(seconds, self._stalls))

    async def _release_after(self, seconds: float, stall: int) -> None:
        await asyncio.sleep(seconds)
        if stall == self._stalls:  # otherwise a later one holds, with its own end
            self.release()

    def draw_babble(self, activity: "Activity", command: str) -> float | None:
        """See `Activity.draw_babble`."""
        for armed in self._matching(activity):
            fault = armed.fault
            if isinstance(fault, Babble) and fault.match in command:
                self._strike(armed, activity.detail)
                return fault.bytes
        return None

    def draw_flips(self, activity: "Activity", size: int) -> list[tuple[int, int]]:
        """See `Activity.draw_flips`."""
        flips: list[tuple[int, int]] = []
        for armed in self._matching(activity):
            fault = armed.fault
            if not isinstance(fault, Corrupt):
                continue
            armed.files += 1
            if armed.files >= fault.file and size > 0:
                chance = random.Random(fault.seed + armed.strikes)  # noqa: S311 - to be repeatable
                places = chance.sample(range(size), min(fault.flips, size))
                flips += [(place, 1 << chance.randrange(8)) for place in places]
                armed.files = 0
                self._strike(armed, f"{activity.detail} at {places[:8]}")
        return flips


class Activity:
    """One push, pull, listing, command or forwarded connection in progress.

    Attributes:
        detail: description for the event log.
        pid: the process of a command, once it runs.
    """

    def __init__(self, injector: Injector, kinds: frozenset[str], detail: str) -> None:
        self.kinds = kinds
        self.detail = detail
        self.pid: int | None = None
        self.ended = False
        self._injector = injector
        self._met: set[int] = set()

    async def transfer(self, count: int) -> None:
        """Wait until a packet of `count` bytes may pass."""
        if not self._injector.idle:
            await self._injector.pass_packet(self, count)

    def draw_babble(self, command: str) -> float | None:
        """Return how many bytes of garbage the command prints; `None` for its own output."""
        return None if self._injector.idle else self._injector.draw_babble(self, command)

    def draw_flips(self, size: int) -> list[tuple[int, int]]:
        """Return the bits to flip in a received file of `size` bytes: offsets and masks."""
        return self._injector.draw_flips(self, size)

    def is_first(self, armed: object) -> bool:
        """Check whether this activity meets an armed fault for the first time, and remember it."""
        new = id(armed) not in self._met
        self._met.add(id(armed))
        return new


@dataclass(frozen=True, slots=True)
class Effects:
    """Effects that faults have on the parts of a device."""

    connections: list[DaemonConnection]
    processes: ProcessTable
    throttler: Throttler
    storage: Storage
    userland: Userland
    power: PowerQueue

    def drop(self) -> None:
        """Break all connections."""
        for connection in list(self.connections):
            connection.abort()

    def stall(self) -> None:
        """Stall all connections."""
        for connection in self.connections:
            connection.stall()

    def resume(self) -> None:
        """End a stall."""
        for connection in self.connections:
            connection.resume()

    def reboot(self) -> None:
        """Reboot."""
        self.power.put(PowerCommand(PowerAction.REBOOT))

    def cut_power(self, off_s: float, unsynced_s: float) -> None:
        """Break connections at once; the device then cuts the power."""
        self.drop()
        self.power.put(PowerCommand(PowerAction.CUT, off_s, unsynced_s))

    def limit_free(self, free: int | None) -> None:
        """Let `/data` take only `free` more bytes; `None` ends the limit."""
        self.storage.limit_free(free)
        self.userland.write_limit(self.storage.limit_bytes)

    def throttle(self, factor: float) -> None:
        """Give processes 1/`factor` of their time."""
        self.throttler.limit("fault", 1 / factor)

    def signal_runner(self, pid: int, fault: Runner | Dsp) -> list[int]:
        """Signal the matching descendants of `pid`, and return their pids."""
        name = "ABRT" if isinstance(fault, Dsp) else fault.signal
        number = signal.Signals[f"SIG{name}"]
        victims = [
            process.pid
            for process in self._below(pid)
            if process.alive and _is_struck(process.pid, fault)
        ]
        for victim in victims:
            if isinstance(fault, Dsp):
                write_stderr(victim, "".join(f"{line}\n" for line in DSP_MESSAGES[fault.cause]))
            if number is signal.SIGSTOP:
                self.throttler.leave_stopped(victim)
            send_signal(victim, number)
        return victims

    def _below(self, pid: int) -> list[ProcessStat]:
        processes = self.processes.all()
        below = {pid}
        for process in processes:  # parents come before children
            if process.parent in below or process.session == pid:
                below.add(process.pid)
        return [process for process in processes if process.pid in below]


def _is_struck(pid: int, fault: Runner | Dsp) -> bool:
    if isinstance(fault, Dsp):
        return has_mapped(pid, "libQnnHtp.so")
    return _matches(command_line(pid), fault.match.encode())


def _matches(arguments: list[bytes], text: bytes) -> bool:
    if not arguments or PurePosixPath(arguments[0].decode("utf-8", "replace")).name in _SHELLS:
        return False
    return any(text in argument for argument in arguments)
