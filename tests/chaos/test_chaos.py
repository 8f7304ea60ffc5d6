"""Faults on the way: every case ends rightly or with an error that names the fault.

Cases run in child processes with an adb server, devices and pools of their own. `make chaos` runs
the campaign; `QNNFARM_CHAOS_SEED`, `QNNFARM_CHAOS_FAULTS`, `QNNFARM_CHAOS_WORKERS` change it,
and `QNNFARM_CHAOS_LOG` names a file for every verdict. One case is run again with
`python -m tests.chaos.worker WORK SEED CASE`. plugins/virtual_android/faults.md has more.
"""

import contextlib
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import Campaign, Verdict, say
from tests.chaos.drawing import cases_with, draw
from tests.chaos.ends import End, unexplained
from tests.chaos.lab import end_adb

SEED = int(os.environ.get("QNNFARM_CHAOS_SEED", "4"))
FAULTS = int(os.environ.get("QNNFARM_CHAOS_FAULTS", "700"))
WORKERS = int(os.environ.get("QNNFARM_CHAOS_WORKERS", "2"))
LOG = os.environ.get("QNNFARM_CHAOS_LOG", os.devnull)


def campaign(seed: int, build_cache: Path) -> Campaign:
    def command(work: Path) -> list[str]:
        words = [sys.executable, "-m", "tests.chaos.worker", str(work), str(seed)]
        return [*words, "--build-cache", str(build_cache)]

    return Campaign(command, partial(_lost, seed), "wrong", LOG, 900.0, _end_adb)


def _lost(seed: int, case: int, reason: str) -> Verdict:
    case_ = draw(seed, case)
    return {
        "case": case, "scene": case_.scene, "told": case_.told(), "struck": [], "strikes": 0,
        "ends": ["worker"], "wrong": [f"the worker is lost: {reason}"],
    }  # fmt: skip


def _end_adb(work: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        end_adb(int((work / "adb-port").read_text()))


def summary(verdicts: list[dict[str, Any]]) -> str:
    """What struck how many cases, and how what was begun in them ended."""
    scenes = Counter(one["scene"] for one in verdicts)
    struck = Counter(kind for one in verdicts for kind in one["struck"])
    ends = Counter(end for one in verdicts for end in one["ends"])
    strikes = sum(one["strikes"] for one in verdicts)
    return (
        f"{dict(scenes)}; {strikes} faults struck, cases by kind {dict(struck)}; ends {dict(ends)}"
    )


def test_a_case_is_drawn_from_its_seed_and_number_alone() -> None:
    drawn = [draw(7, number) for number in range(200)]
    assert drawn == [draw(7, number) for number in range(200)]
    assert drawn != [draw(8, number) for number in range(200)]
    kinds = {fault.kind for case in drawn for _, fault in case.faults}
    kinds |= {act.kind for case in drawn for act in case.acts}
    wanted = "drop stall corrupt full reboot power throttle slow runner"
    acts = {"adb_kill", "kill", "terminate", "suspend", "release"}
    assert kinds == {*wanted.split(), *acts}
    assert sum(case.count for case in drawn[: cases_with(7, 100)]) >= 100


def test_only_a_fault_that_struck_excuses_an_error_and_only_one_that_names_it() -> None:
    lost = End("x", "error", "DeviceLostError", "device d went away during a push: closed")
    assert not unexplained(lost, ["drop"])
    assert unexplained(lost, [])
    assert unexplained(lost, ["corrupt", "full"])
    assert unexplained(End("x", "error", "DeviceLostError", "oops"), ["drop"])
    assert unexplained(End("x", "wrong"), ["drop"])
    assert unexplained(End("x", "hang"), ["stall"])
    assert unexplained(End("x", "killed"), ["terminate"])
    assert not unexplained(End("x", "killed"), ["kill"])


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_the_campaign(tmp_path: Path, build_cache: Path) -> None:
    count = cases_with(SEED, FAULTS)
    say(f"seed {SEED}: {count} cases for which {FAULTS} faults are drawn")
    began = time.monotonic()
    verdicts = campaign(SEED, build_cache).run(tmp_path, range(count), WORKERS)
    minutes = (time.monotonic() - began) / 60
    say(f"seed {SEED}: {count} cases in {minutes:.1f} minutes: {summary(verdicts)}")
    # The others came too late: what they were to befall had ended.
    assert sum(one["strikes"] for one in verdicts) > FAULTS * 0.6
