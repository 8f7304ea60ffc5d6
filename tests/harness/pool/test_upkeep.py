"""Upkeep when a repair raises an unexpected exception."""

from typing import TYPE_CHECKING, cast

import pytest

from harness.devices.device import Device
from harness.devices.spec import DeviceSpec
from harness.pool.config import PoolConfig
from harness.pool.failure_policy import FailureReport
from harness.pool.fence import FenceClaims
from harness.pool.members import Member
from harness.pool.upkeep import Upkeep
from tests.harness.pool.conftest import Bench

if TYPE_CHECKING:
    from harness.pool.opener import Opener


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
    config, opener = PoolConfig(), cast("Opener", Broken())
    claims = FenceClaims(bench.ledger, opener, bench.clock, timeout_s=1)
    context = bench.context(claims=claims, opener=opener, config=config)
    member = Member("a", DeviceSpec("android", "a"))
    bench.clock.time += config.quarantine.backoff_s
    with pytest.raises(ZeroDivisionError):
        Upkeep(context).repair(member, "a")
    assert bench.ledger.due_repairs() == []
    assert not context.heartbeat.active
    bench.clock.time += 2 * config.quarantine.backoff_s + 1
    assert bench.ledger.due_repairs() == ["a"]
