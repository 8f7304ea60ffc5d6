"""Commands hold the device that they use."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cli.device_lease import device_source, lease_device
from harness.devices.adb.client import AdbServer
from harness.devices.device import Device
from harness.errors import (
    DeviceConnectError,
    LeaseTimeoutError,
    NoDeviceError,
    RequirementError,
    UnknownVirtualDeviceError,
    WrongUseError,
)
from plugins.virtual_android import manager
from tests.harness.cli.conftest import Run


@pytest.fixture
def new_device_name() -> str:
    return f"held-{os.getpid()}"


def test_a_device_that_is_used_is_not_used_by_others(
    adb_environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lease_device("local", wait_s=60, purpose="the first") as device:
        assert device.shell(["echo", "here"]).stdout == "here\n"
        with (
            pytest.raises(LeaseTimeoutError, match=r"local is held by .*: the first"),
            lease_device("local", wait_s=0, purpose="the second"),
        ):
            pass
        assert not capsys.readouterr().err
    with lease_device("local", wait_s=0, purpose="the second"):
        pass


def test_waiting_for_a_lease_names_its_holder(
    adb_environment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.pool.pool._PATIENCE_S", 0.0)
    holding, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lease_device("local", wait_s=60, purpose="the first"):
            holding.set()
            done.wait(200)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(200)
    with (
        pytest.raises(LeaseTimeoutError, match=r"within [1-9][0-9.]* s"),
        lease_device("local", wait_s=2.5, purpose="the second"),
    ):
        pass
    done.set()
    holder.join()
    assert "waiting for a device, 2.5 s at most: local is held by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("nosuch", NoDeviceError, "nosuch"),
        ("virtual:x", UnknownVirtualDeviceError, "x"),
        ("linux:-x", WrongUseError, "names no device"),
        ("shared", WrongUseError, "virtual:shared names the virtual device"),
    ],
)
def test_an_absent_device_is_not_waited_for(
    virtual_device: Device, name: str, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told), lease_device(name, wait_s=600, purpose=""):
        pass


def test_a_virtual_device_is_taken_by_its_name(virtual_device: Device) -> None:
    with lease_device("virtual:shared", wait_s=60, purpose="") as device:
        assert device.boot_id() == virtual_device.boot_id()


def test_a_stopped_virtual_device_is_not_started(
    adb_server: AdbServer, new_device_name: str
) -> None:
    """Nobody would know that it goes on running."""
    manager.start(new_device_name, "SM8750")
    manager.stop(new_device_name)
    try:
        with (
            pytest.raises(DeviceConnectError, match="it is stopped; `qnnfarm device start"),
            lease_device(f"virtual:{new_device_name}", wait_s=600, purpose=""),
        ):
            pass
        assert manager.get(new_device_name).state == "stopped"
    finally:
        manager.remove(new_device_name)


def test_a_device_that_somebody_holds_is_not_stopped(
    adb_server: AdbServer, qnnfarm: Run, new_device_name: str
) -> None:
    serial = manager.start(new_device_name, "SM8750").serial
    adb_server.connect(serial)
    try:
        with lease_device(serial, wait_s=60, purpose="a long run"):
            for command in ("stop", "rm"):
                refused = qnnfarm("device", command, new_device_name)
                assert refused.returncode == 2
                assert "held by" in refused.stderr
                assert "--force" in refused.stderr
            assert manager.get(new_device_name).state == "running"
        assert qnnfarm("device", "stop", new_device_name).returncode == 0
        manager.start(new_device_name, "SM8750")
        with lease_device(f"virtual:{new_device_name}", wait_s=60, purpose="another"):
            assert qnnfarm("device", "rm", new_device_name, "--force").returncode == 0
    finally:
        with contextlib.suppress(UnknownVirtualDeviceError):
            manager.remove(new_device_name)


POOL = "devices: [{type: local, name: here}]"


@contextlib.contextmanager
def leased(*names: str, pool: Path | None = None, wait_s: float = 60) -> Iterator[Device]:
    """The device of a first session of `bench`."""
    with (
        device_source(list(names) or None, pool, command="bench", wait_s=wait_s) as source,
        source(0, "SM8750") as device,
    ):
        yield device


def test_a_pool_is_found_as_the_pool_commands_find_it(
    adb_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `$QNNFARM_POOL`, or as `./pool.yaml`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pool.yaml").write_text(POOL)
    for name in ("here", "local"):  # as the pool calls it, and as `--device` does without one
        with leased(name) as device:
            assert device.type == "local"
    told = "none has the SoC SM8750 \\(here: unknown\\)"
    with pytest.raises(RequirementError, match=told), leased(wait_s=0):
        pass
    (tmp_path / "pool.yaml").rename(tmp_path / "other.yaml")
    monkeypatch.setenv("QNNFARM_POOL", "other.yaml")
    with leased("here"):
        pass


def test_a_name_outside_a_pool_that_nobody_asked_for_is_a_device(
    adb_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pool.yaml"
    path.write_text("devices: [{type: android, identifier: usb}]")
    with leased("local") as device:
        assert device.type == "local"
    with (
        pytest.raises(RequirementError, match="the name local"),
        leased("local", pool=path, wait_s=0),
    ):
        pass
    monkeypatch.setenv("ANDROID_SERIAL", "nosuch")
    with pytest.raises(NoDeviceError, match="nosuch"), leased(wait_s=0):
        pass
