"""Owners of leases: whether they have ended, and how people read them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.pool.owner import has_ended, this_process

_LABEL = "from harness.pool.owner import this_process; print(this_process().label)"


@pytest.mark.parametrize(("worker", "program"), [("gw1", "pytest gw1"), ("", "python")])
def test_a_worker_of_xdist_is_pytest(worker: str, program: str) -> None:
    environment = os.environ | {"PYTEST_XDIST_WORKER": worker}
    done = subprocess.run(
        [sys.executable, "-c", _LABEL],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.partition(": ")[2].startswith(f"{program} (pid ")


def test_a_reused_pid_is_not_the_owner() -> None:
    me = this_process()
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert me.started == int(stat[19])
    assert not has_ended(me)
    assert has_ended(replace(me, started=me.started - 1))
    assert has_ended(replace(me, boot="another boot"))
    assert not has_ended(replace(me, started=1, namespace="another namespace"))
    assert not has_ended(replace(me, started=1, boot="another boot", host="another host"))
