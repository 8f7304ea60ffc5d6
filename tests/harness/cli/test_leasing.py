"""Commands hold the device that they use."""

import threading
from pathlib import Path

import pytest

from harness.cli.leasing import leased
from harness.errors import DeviceSpecError, LeaseTimeoutError, NoDeviceError


def test_a_device_that_is_used_is_not_used_by_others(
    adb_environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with leased("local", wait_s=60, purpose="the first") as device:
        assert device.shell(["echo", "here"]).stdout == "here\n"
        with (
            pytest.raises(LeaseTimeoutError, match=r"local is held by .*: the first"),
            leased("local", wait_s=0, purpose="the second"),
        ):
            pass
        assert not capsys.readouterr().err
    with leased("local", wait_s=0, purpose="the second"):
        pass


def test_who_waits_is_told_for_what(
    adb_environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holding, done = threading.Event(), threading.Event()

    def hold() -> None:
        with leased("local", wait_s=60, purpose="the first"):
            holding.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(60)
    with pytest.raises(LeaseTimeoutError), leased("local", wait_s=1.5, purpose="the second"):
        pass
    done.set()
    holder.join()
    assert "waiting for a device, 1.5 s at most: local is held by" in capsys.readouterr().err


def test_what_is_not_there_is_not_waited_for(adb_server: object) -> None:
    with pytest.raises(NoDeviceError), leased("nosuch", wait_s=600, purpose=""):
        pass
    with pytest.raises(DeviceSpecError), leased("linux:-x", wait_s=600, purpose=""):
        pass
