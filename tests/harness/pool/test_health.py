"""Health of a pool's devices: read from its ledger, without asking a device."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.errors import ConfigFileError
from harness.pool.health import read_device_health
from harness.pool.pool import Pool
from reports.devices import read_device_health as read_by_entry_point

CONFIG = """
devices:
  - {type: android, identifier: R3CX1, name: desk-1}
  - {type: android, identifier: R3CX2, name: desk-2}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pool whose devices no server knows."""
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("ADB_SERVER_SOCKET", "tcp:127.0.0.1:1")
    monkeypatch.delenv("QNNFARM_POOL", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "lab.yaml"
    path.write_text(CONFIG)
    return path


def test_states_and_events_come_from_the_ledger(config: Path) -> None:
    before = datetime.now(UTC)
    with Pool.open(config, probe=False) as pool:
        pool.admin.drain("desk-2", "its screen is broken")
    found = {device.name: device for device in read_device_health(config)}
    assert set(found) == {"desk-1", "desk-2"}
    broken = found["desk-2"]
    assert broken.state == "draining"
    assert broken.reason.startswith("its screen is broken")
    assert broken.since >= before.replace(microsecond=0)
    assert "R3CX2" in broken.serials
    assert "its screen is broken" in broken.events[-1].text
    assert broken in read_by_entry_point(config)


def test_without_a_pool_there_is_nothing_to_tell(config: Path) -> None:
    assert read_device_health() == ()
    config.rename(config.with_name("pool.yaml"))
    assert {device.name for device in read_device_health()} == {"desk-1", "desk-2"}


def test_a_pool_that_is_named_must_be_there(config: Path) -> None:
    with pytest.raises(ConfigFileError):
        read_device_health(config.with_name("none.yaml"))
