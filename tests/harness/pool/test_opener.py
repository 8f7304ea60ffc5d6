"""Probing reports slow devices, and a pool that cannot open closes its opener."""

import threading
from pathlib import Path

import pytest

from harness.devices.device import Device
from harness.devices.spec import DeviceSpec
from harness.errors import LedgerError
from harness.pool.config import PoolConfig
from harness.pool.members import Member
from harness.pool.opener import Opener
from harness.pool.pool import Pool
from harness.pool.states import MemberState


class _Late(Opener):
    """Opens this host, but only after it was reported as slow."""

    def __init__(self) -> None:
        super().__init__(PoolConfig())
        self.told: list[str] = []
        self.closed = False
        self._telling = threading.Event()

    def tell(self, words: str) -> None:
        self.told.append(words)
        self._telling.set()

    def open(self, member: Member) -> Device:
        assert self._telling.wait(200)
        return super().open(member)

    def close(self) -> None:
        self.closed = True
        super().close()


def test_slow_devices_are_reported(
    adb_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.pool.opener._SLOW_S", 0.1)
    late, member = _Late(), Member("slow", DeviceSpec("local", ""))
    with Pool(
        [member], PoolConfig(), late, ledger=tmp_path / "p.db", on_progress=late.tell
    ) as pool:
        (status,) = pool.members()
    assert status.state is MemberState.READY
    assert late.told == ["looking for slow: a device has 30 s to answer"]


def test_a_pool_that_cannot_open_closes_its_opener(tmp_path: Path) -> None:
    late = _Late()
    (tmp_path / "p.db").mkdir()
    with pytest.raises(LedgerError):
        Pool([], PoolConfig(), late, ledger=tmp_path / "p.db")
    assert late.closed
