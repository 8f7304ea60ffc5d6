"""A cell is cut short from another thread, between and within what it does on its device."""

import threading
from pathlib import Path
from typing import cast

import pytest

from harness.devices.device import Device
from harness.errors import DeviceLostError, DeviceTimeoutError, LeaseLostError
from harness.plans.cancellation import CancelToken, CellInterrupted, cancellable


def test_nothing_more_is_done_on_the_device(virtual_device: Device) -> None:
    token = CancelToken()
    device = cancellable(virtual_device, token)
    assert device.serial == virtual_device.serial
    assert device.shell(["echo", "a b"]).stdout == "a b\n"
    token.interrupt()
    for operation in (device.properties, device.free_bytes, lambda: device.shell(["true"])):
        with pytest.raises(CellInterrupted):
            operation()
    with token.shield():
        assert device.shell(["echo", "cleaning"]).stdout == "cleaning\n"
    with pytest.raises(CellInterrupted):
        token.check()


def test_a_transfer_ends_in_its_middle(virtual_device: Device, tmp_path: Path) -> None:
    token = CancelToken()
    device = cancellable(virtual_device, token)
    local = tmp_path / "large"
    with local.open("wb") as sink:
        sink.truncate(64 << 20)
    sent: list[int] = []

    def progress(count: int) -> None:
        sent.append(count)
        token.interrupt()

    with pytest.raises(CellInterrupted):
        device.push(local, f"{virtual_device.work_root}/large", on_progress=progress)
    assert sum(sent) < 64 << 20


def test_errors_caused_by_cancellation_count_as_cancellation() -> None:
    class Breaking:
        def boot_id(self) -> str:
            token.expire("serial", "cell x", 5.0)
            raise DeviceLostError("serial", "a command", "it was ended")

    token = CancelToken()
    with pytest.raises(DeviceTimeoutError, match="cell x took longer than 5 s"):
        cancellable(cast("Device", Breaking()), token).boot_id()
    token.interrupt()
    with pytest.raises(DeviceTimeoutError):  # the first cause stays
        token.check()


def test_a_device_that_was_taken_is_no_timeout_of_its_cell() -> None:
    class Taken:
        def boot_id(self) -> str:
            token.expire("serial", "cell x", 5.0)
            raise LeaseLostError("a", 7, "ann took it back")

        def free_bytes(self) -> None:
            other.interrupt()
            raise LeaseLostError("a", 7, "ann took it back")

    token, other = CancelToken(), CancelToken()
    with pytest.raises(LeaseLostError):
        cancellable(cast("Device", Taken()), token).boot_id()
    with pytest.raises(CellInterrupted):  # it runs again anyway
        cancellable(cast("Device", Taken()), other).free_bytes()


def test_a_cut_ends_what_runs_now_and_whoever_cleans_up_waits_for_that() -> None:
    token, ending, ended = CancelToken(), threading.Event(), threading.Event()
    order: list[str] = []

    def slow_end() -> None:
        ending.set()
        ended.wait(200)
        order.append("ended")

    def work() -> None:
        with token.on_cancel(slow_end):
            threading.Thread(target=token.interrupt).start()
            assert ending.wait(200)
            threading.Timer(0.05, ended.set).start()
            token.check()
        order.append("never")

    with pytest.raises(CellInterrupted):
        work()
    order.append("cleaned up")
    assert order == ["ended", "cleaned up"]
    with pytest.raises(CellInterrupted), token.on_cancel(slow_end):
        order.append("nothing begins any more")
    assert order == ["ended", "cleaned up"]


def test_one_end_that_fails_does_not_keep_another() -> None:
    token, ended = CancelToken(), threading.Event()

    def fails() -> None:
        raise DeviceLostError("serial", "a sweep", "closed")

    with token.on_cancel(fails), token.on_cancel(ended.set):
        token.interrupt()
    assert ended.is_set()
