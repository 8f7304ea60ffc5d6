"""The run that decides whether a device in quarantine can be trusted again."""

import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness.deploy.budget import Budget
from harness.deploy.scripts import ensure_scripts
from harness.devices.base import Device
from harness.errors import DeploymentCorruptError, DeviceLostError, RuntimeOutputError
from harness.pool.naming import PROBATION, named

Probation = Callable[[Device], None]
"""Raises a `HarnessError` if the device does not pass."""

_BYTES = 4 << 20
_ROUNDS = 3
_TIMEOUT_S = 120.0


def standard_probation(device: Device) -> None:
    """Files survive the way there and back, commands answer rightly, and it does not reboot.

    Raises:
        DeploymentCorruptError: a file came out as another.
        RuntimeOutputError: a command answered wrongly.
        DeviceError: it failed otherwise.
    """
    with named(PROBATION):
        _try_out(device)


def _try_out(device: Device) -> None:
    budget = Budget(device.serial, PROBATION, _TIMEOUT_S)
    ensure_scripts(device, budget)
    boot = device.boot_id(timeout_s=budget.left())
    incoming = f"{device.work_root}/incoming"  # where what an interruption leaves is cleared away
    device.shell(["mkdir", "-p", incoming], timeout_s=budget.left())
    remote = f"{incoming}/probation.{secrets.token_hex(8)}"
    try:
        for _ in range(_ROUNDS):
            _round_trip(device, remote, budget)
    finally:
        device.shell(["rm", "-f", remote], timeout_s=30.0, check=False)
    for _ in range(_ROUNDS):
        word = secrets.token_hex(16)
        said = device.shell(["echo", word], timeout_s=budget.left()).stdout
        if said != f"{word}\n":
            raise RuntimeOutputError(device.serial, f"it answered {said!r} to `echo {word}`", said)
    if device.boot_id(timeout_s=budget.left()) != boot:
        raise DeviceLostError(device.serial, PROBATION, "it rebooted")


def _round_trip(device: Device, remote: str, budget: Budget) -> None:
    content = os.urandom(_BYTES)
    expected = hashlib.sha256(content).hexdigest()
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
        local = Path(folder) / "sent"
        local.write_bytes(content)
        device.push(local, remote, timeout_s=budget.left(), mode=0o644)
        answer = device.shell(["sha256sum", remote], timeout_s=budget.left()).stdout
        found = answer.partition(" ")[0]
        if found != expected:
            raise DeploymentCorruptError(device.serial, "a probation file", expected, found)
        back = Path(folder) / "back"
        device.pull(remote, back, timeout_s=budget.left())
        found = hashlib.sha256(back.read_bytes()).hexdigest()
        if found != expected:
            raise DeploymentCorruptError(device.serial, "a probation file", expected, found)
