"""A device whose guard refuses all commands, as the fence does to a holder that lost its lease."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.devices.device import Device
from harness.devices.local import LocalTransport
from harness.errors import DeviceCommandError


class Machine(LocalTransport):
    """This machine, whose reboot is a change of its boot id."""

    def __init__(self, boot_id: Path) -> None:
        super().__init__()
        self._boot_id = boot_id

    def reboot(self, device: Device, timeout_s: float) -> None:  # noqa: ARG002
        self._boot_id.write_text("second\n")


class Refused(Device):
    def __init__(self, device: Device) -> None:
        super().__init__(device.runner.transport, runner=device.runner)
        self._device = device

    @property
    def unleased(self) -> Device:
        return self._device

    def _guarded(self, text: str) -> tuple[str, Mapping[str, str]]:
        return f"echo refused by $NAME >&2; exit 94\n{text}", {"NAME": "guard"}


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    (tmp_path / "boot_id").write_text("first\n")
    monkeypatch.setenv("QNNFARM_BOOT_ID", str(tmp_path / "boot_id"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Refused(Device(Machine(tmp_path / "boot_id")))


def test_what_the_guard_says_reaches_the_caller_and_the_command_does_not_run(
    refused: Device, tmp_path: Path
) -> None:
    with pytest.raises(DeviceCommandError) as failure:
        refused.shell(["touch", f"{tmp_path}/touched"])
    assert failure.value.exit_status == 94
    assert failure.value.log_tail == "refused by guard\n"
    said: list[bytes] = []
    assert refused.stream("echo run", on_output=said.append, timeout_s=60).exit_status == 94
    assert b"".join(said) == b"refused by guard\n"
    assert not (tmp_path / "touched").exists()


def test_a_reboot_is_waited_for_without_the_guard(refused: Device) -> None:
    refused.reboot(timeout_s=60)
    assert refused.boot_id() == "second"
