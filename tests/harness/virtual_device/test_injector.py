"""Which fault ends when, by the injector alone."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.virtual_device.events import EventLog
from harness.virtual_device.faults import Runner, parse_fault
from harness.virtual_device.injection import Injector


class Stillness:
    """Effects of which only whether anything passes is looked at."""

    def __init__(self) -> None:
        self.frozen = False

    def drop(self) -> None: ...

    def stall(self) -> None:
        self.frozen = True

    def resume(self) -> None:
        self.frozen = False

    def reboot(self) -> None: ...

    def cut_power(self, off_s: float, unsynced_s: float) -> None: ...

    def limit_free(self, free: int | None) -> None: ...

    def throttle(self, factor: float) -> None: ...

    def signal_runner(self, pid: int, fault: Runner) -> list[int]:  # noqa: ARG002
        return []


async def _pass(injector: Injector, kind: str) -> None:
    async with injector.activity(kind):
        pass


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    events = EventLog(folder)
    yield events
    events.close()
    os.close(folder)


def test_the_end_of_one_stall_does_not_end_another(events: EventLog) -> None:
    """A reboot ended the first before its time; the second is to last until it is cleared."""

    async def play() -> None:
        effects = Stillness()
        injector = Injector(effects, events)
        injector.arm(parse_fault("stall:seconds=0.2,when=push"))
        first = asyncio.create_task(_pass(injector, "push"))
        await asyncio.sleep(0)
        assert effects.frozen
        injector.release()
        await first
        injector.arm(parse_fault("stall:when=shell"))
        second = asyncio.create_task(_pass(injector, "shell"))
        await asyncio.sleep(0.5)
        assert effects.frozen
        assert not second.done()
        injector.clear()
        await second
        assert not effects.frozen

    asyncio.run(play())


def test_a_stall_lasts_as_long_as_it_is_told(events: EventLog) -> None:
    async def play() -> None:
        effects = Stillness()
        injector = Injector(effects, events)
        injector.arm(parse_fault("stall:seconds=0.05,count=2"))
        for _ in range(2):
            await _pass(injector, "push")
            assert not effects.frozen

    asyncio.run(play())
