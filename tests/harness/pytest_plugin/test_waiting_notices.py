"""A test that waits for its devices says for which, and who holds them since when."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.devices.spec import DeviceSpec
from harness.pool import pool as pool_module
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from harness.pytest_plugin import device_tests
from harness.pytest_plugin.leases import tell_wait
from tests.harness.pytest_plugin.conftest import Farm
from tests.waiting import wait_for

_WAITS = """
import pytest

pytestmark = pytest.mark.device(soc="SM8750")

def test_before(): print("nobody sees this")

def test_needs_it(capfd, device):
    device.shell(["true"])

def test_after(): pass
"""


def test_it_is_said_once_while_it_lasts(
    farm: Farm, two_devices: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_PATIENCE_S", 0.1)
    told: list[str] = []

    def tell(item: pytest.Item, requirement: Requirement, reason: str) -> None:
        told.append(reason)
        tell_wait(item, requirement, reason)

    monkeypatch.setattr(device_tests, "tell_wait", tell)
    spec = DeviceSpec("virtual", two_devices[0])
    with (
        Pool.of([spec]) as pool,
        pool.acquire(Requirement(), purpose="by hand") as lease,
        ThreadPoolExecutor(1) as threads,
    ):

        def release() -> None:
            wait_for(lambda: told)
            time.sleep(1.0)  # it would be said again by now
            lease.release()

        released = threads.submit(release)
        outcome = farm(_WAITS, f"--device={spec}")
        released.result()
    (said,) = [line for line in outcome.output.splitlines() if " waits for " in line]
    start = "qnnfarm: test_it.py::test_needs_it waits for soc=SM8750: "
    assert said.startswith(f"{start}{two_devices[0]} is held by ")
    assert f"(pid {os.getpid()}): by hand since " in said
    assert "nobody sees this" not in outcome.output
    assert outcome.counts() == {"tests": 3}
