"""Mutated models: refused in one line, or built into what they compute. Never anything else.

Cases run in child processes, so that a crash or a hang of whatever library is a failure of its
case. `make fuzz` runs the campaign; `QNNFARM_FUZZ_SEED`, `QNNFARM_FUZZ_CASES` and
`QNNFARM_FUZZ_WORKERS` change it, and `QNNFARM_FUZZ_LOG` names a file for every verdict. One case
is run again with `python -m tests.fuzz.worker WORK SEED COMPILE_EVERY CASE`.
"""

import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.campaigns import Campaign, Verdict, say

SEED = int(os.environ.get("QNNFARM_FUZZ_SEED", "20"))
CASES = int(os.environ.get("QNNFARM_FUZZ_CASES", "5000"))
WORKERS = int(os.environ.get("QNNFARM_FUZZ_WORKERS", "2"))
LOG = os.environ.get("QNNFARM_FUZZ_LOG", os.devnull)
FEW = 4
COMPILE_EVERY = 20
"""Of the cases that reach the compiler, about one in five, one in so many goes through it."""


def campaign(seed: int, compile_every: int) -> Campaign:
    def command(work: Path) -> list[str]:
        program = [sys.executable, "-m", "tests.fuzz.worker"]
        return [*program, str(work), str(seed), str(compile_every)]

    return Campaign(command, _lost, "fault", LOG)


def _lost(case: int, reason: str) -> Verdict:
    return {"case": case, "did": [], "outcome": "", "fault": reason}


@pytest.mark.needs("libatomic1", "plugins.onnx_exports")
def test_a_few_mutations(tmp_path: Path) -> None:
    verdicts = campaign(1, compile_every=1 << 30).run(tmp_path, range(FEW))
    outcomes = Counter(one["outcome"] for one in verdicts)
    assert outcomes["refused"] > FEW // 3
    assert outcomes["built"]


@pytest.mark.variant
def test_a_worker_that_dies_or_hangs_is_told_by_its_case(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "for case in map(int, sys.stdin):\n"
        "    if case == 1: os.abort()\n"
        "    if case == 2: time.sleep(60)\n"
        '    print(\'{"case": %d, "fault": ""}\' % case, flush=True)\n'
    )
    faults: dict[int, str] = {}

    def lost(case: int, reason: str) -> Verdict:
        faults[case] = reason.partition(":")[0]
        return {"case": case, "fault": reason}

    python = [sys.executable, "-c", program]
    with pytest.raises(AssertionError, match="2 of 4 cases"):
        Campaign(lambda _: python, lost, "fault", timeout_s=10.0).run(tmp_path, range(4))
    assert faults == {1: "the process died", 2: "it hangs"}


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_the_campaign(tmp_path: Path) -> None:
    say(f"seed {SEED}")
    began = time.monotonic()
    verdicts = campaign(SEED, COMPILE_EVERY).run(tmp_path, range(CASES), WORKERS)
    outcomes = Counter(one["outcome"] for one in verdicts)
    minutes = (time.monotonic() - began) / 60
    say(f"{CASES} cases in {minutes:.1f} minutes: {dict(outcomes)}")
    assert outcomes["refused"] > CASES // 4
    assert outcomes["built"] > CASES // 20
