"""Who holds a device, as people read it."""

import os
import subprocess
import sys

import pytest

_LABEL = "from harness.pool.owner import this_process; print(this_process().label)"


@pytest.mark.parametrize(("worker", "program"), [("gw1", "pytest gw1"), ("", "python")])
def test_a_worker_of_xdist_is_pytest(worker: str, program: str) -> None:
    environment = os.environ | {"PYTEST_XDIST_WORKER": worker}
    done = subprocess.run(
        [sys.executable, "-c", _LABEL],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.partition(": ")[2].startswith(f"{program} (pid ")
