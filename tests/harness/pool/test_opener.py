"""Who looks for devices that let wait for an answer says so."""

import threading
from pathlib import Path

import pytest

from harness.devices.base import Device
from harness.devices.spec import DeviceSpec
from harness.errors import LedgerError
from harness.pool.config import PoolConfig
from harness.pool.members import Member
from harness.pool.opener import DeviceOpener
from harness.pool.pool import Pool
from harness.pool.states import MemberState


class _Late(DeviceOpener):
    """Reaches this host, but not before somebody was told that it lets wait."""

    def __init__(self) -> None:
        super().__init__(PoolConfig())
        self.told: list[str] = []
        self.closed = False
        self._telling = threading.Event()

    def tell(self, words: str) -> None:
        self.told.append(words)
        self._telling.set()

    def open(self, member: Member) -> Device:
        assert self._telling.wait(120)
        return super().open(member)

    def close(self) -> None:
        self.closed = True
        super().close()


def test_what_is_waited_for_is_told(adb_environment: Path, tmp_path: Path) -> None:
    late, member = _Late(), Member("slow", DeviceSpec("local", ""))
    with Pool(
        [member], PoolConfig(), late, ledger_path=tmp_path / "p.db", on_progress=late.tell
    ) as pool:
        (status,) = pool.members()
    assert status.state is MemberState.READY
    assert late.told == ["looking for slow: a device has 30 s to answer"]


def test_a_pool_that_does_not_come_about_leaves_nothing_open(tmp_path: Path) -> None:
    late = _Late()
    (tmp_path / "p.db").mkdir()
    with pytest.raises(LedgerError):
        Pool([], PoolConfig(), late, ledger_path=tmp_path / "p.db")
    assert late.closed
