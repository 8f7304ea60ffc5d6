"""Renewal of the leases of a process."""

import time

from harness.pool.context import Heartbeat
from harness.pool.ledger import Ledger
from tests.harness.pool.conftest import Bench, process

_TTL_S = 0.06
"""By a clock that stands still: the heartbeat beats often, and no lease runs out meanwhile."""


def test_a_lease_is_renewed_until_it_is_stopped(bench: Bench) -> None:
    bench.add("a")
    ledger = Ledger(
        bench.database, bench.clock, ttl_s=_TTL_S, rule=bench.rule, ended=lambda _: False
    )
    ticket = ledger.enqueue(process(1), ["a"], 1)
    rows = ledger.try_grant(ticket)
    assert rows
    heartbeat = Heartbeat(ledger)
    grant = rows[0].grant
    heartbeat.start(rows)
    beating = heartbeat._thread
    assert beating is not None
    bench.clock.time += _TTL_S / 2
    while heartbeat.until(grant) < bench.clock.boottime() + _TTL_S:  # until it has beaten again
        time.sleep(0.01)
    assert ledger.holds(grant, "a")
    heartbeat.stop(grant)
    assert heartbeat.until(grant) < bench.clock.boottime()
    beating.join()
