"""Upkeep when a repair raises an unexpected exception."""

import pytest

from harness.devices.device import Device
from harness.devices.spec import DeviceSpec
from harness.pool.failure_policy import FailureReport
from harness.pool.members import Member
from harness.pool.upkeep import Upkeep
from tests.harness.pool.conftest import Bench


class Broken:
    """Raises an unexpected exception in place of opening a device."""

    def open(self, _: Member) -> Device:
        raise ZeroDivisionError

    def forget(self, _: Member) -> None:
        pass


@pytest.mark.parametrize("weight", [1.0, 3.0], ids=["recovery", "probation"])
def test_a_crashed_repair_is_retried_after_a_backoff(bench: Bench, weight: float) -> None:
    bench.add("a")
    bench.fail("a", FailureReport("DeviceLostError", weight, recover=weight < 3, text="it left"))
    context = bench.context(Broken())
    member = Member("a", DeviceSpec("android", "a"))
    backoff_s = context.config.quarantine.backoff_s
    bench.clock.time += backoff_s
    with pytest.raises(ZeroDivisionError):
        Upkeep(context).repair(member, "a")
    assert bench.ledger.due_repairs() == []
    assert not context.heartbeat.active
    bench.clock.time += 2 * backoff_s + 1
    assert bench.ledger.due_repairs() == ["a"]
