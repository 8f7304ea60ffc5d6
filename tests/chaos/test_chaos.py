"""Faults on the way: every case ends rightly or with an error that names the fault.

Cases run in child processes with an adb server, devices and pools of their own. `make chaos` runs
the campaign; `QNNFARM_CHAOS_SEED`, `QNNFARM_CHAOS_FAULTS`, `QNNFARM_CHAOS_WORKERS` change it,
and `QNNFARM_CHAOS_LOG` names a file for every verdict. One case is run again with
`python -m tests.chaos.worker WORK SEED CASE`. docs/faults.md has more.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

import pytest

from tests.chaos.drawing import cases_with, draw
from tests.chaos.ends import End, unexplained
from tests.chaos.lab import end_adb

pytestmark = pytest.mark.first

SEED = int(os.environ.get("QNNFARM_CHAOS_SEED", "4"))
FAULTS = int(os.environ.get("QNNFARM_CHAOS_FAULTS", "700"))
WORKERS = int(os.environ.get("QNNFARM_CHAOS_WORKERS", "2"))
LOG = os.environ.get("QNNFARM_CHAOS_LOG", os.devnull)
_ROOT = Path(__file__).parents[2]
_CASE_TIMEOUT_S = 900.0


class Worker:
    """A child that runs cases; a case that kills it or hangs is told, and another goes on."""

    def __init__(self, work: Path, seed: int, build_cache: Path, verdicts: IO[str]) -> None:
        self._work = work
        self._options = ["--build-cache", str(build_cache)]
        self._seed = seed
        self._verdicts = verdicts

    def run(self, cases: "SimpleQueue[int]") -> list[dict[str, Any]]:
        """The verdicts of the cases that it got hold of."""
        found: list[dict[str, Any]] = []
        while not cases.empty():
            for verdict in self._some(cases, len(found)):
                self._verdicts.write(json.dumps(verdict) + "\n")
                found.append(verdict)
        return found

    def _some(self, cases: "SimpleQueue[int]", number: int) -> Iterator[dict[str, Any]]:
        work = self._work / str(number)
        work.mkdir(parents=True)
        command = [sys.executable, "-m", "tests.chaos.worker", str(work), str(self._seed)]
        with (work / "worker.log").open("wb") as log:
            child = subprocess.Popen(
                [*command, *self._options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=_ROOT,
                start_new_session=True,
            )
        assert child.stdin is not None
        assert child.stdout is not None
        lines = lines_of(child.stdout, _CASE_TIMEOUT_S)
        try:
            while (case := _next(cases)) is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.write(b"%d\n" % case)
                    child.stdin.flush()
                line = next(lines, None)
                if line is None:
                    yield self._died(case, (work / "worker.log").read_text()[-2000:])
                    return
                yield json.loads(line)
            child.stdin.close()
            assert child.wait(60) == 0, (work / "worker.log").read_text()[-2000:]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            with contextlib.suppress(FileNotFoundError):
                end_adb(int((work / "adb-port").read_text()))

    def _died(self, case: int, log: str) -> dict[str, Any]:
        draws = draw(self._seed, case)
        return {
            "case": case,
            "scene": draws.scene,
            "told": draws.told(),
            "struck": [],
            "strikes": 0,
            "ends": ["worker"],
            "wrong": [f"the worker died or hung: {log}"],
        }


def _next(cases: "SimpleQueue[int]") -> int | None:
    with contextlib.suppress(Empty):
        return cases.get_nowait()
    return None


def lines_of(pipe: IO[bytes], timeout_s: float) -> Iterator[bytes]:
    """Lines as they come; ends with the pipe, or when there is none for so long."""
    rest = b""
    while select.select([pipe], [], [], timeout_s)[0]:
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def campaign(
    work: Path, seed: int, cases: list[int], build_cache: Path, n_workers: int = 1
) -> list[dict[str, Any]]:
    """Run cases of a seed.

    Raises:
        AssertionError: a case ended otherwise than it may, with all that is needed to run it again.
    """
    with Path(LOG).open("a", buffering=1) as log, ThreadPoolExecutor(n_workers) as pool:
        left: SimpleQueue[int] = SimpleQueue()  # each takes the next case when it is done with one
        for case in cases:
            left.put(case)
        workers = [Worker(work / f"{n}", seed, build_cache, log) for n in range(n_workers)]
        verdicts = [one for found in pool.map(lambda w: w.run(left), workers) for one in found]
    wrong = [one for one in verdicts if one["wrong"]]
    for one in wrong:
        say(f"seed {seed} case {one['case']} ({one['scene']}) {one['told']}: {one['wrong']}")
    assert sorted(one["case"] for one in verdicts) == sorted(cases)
    assert not wrong, f"{len(wrong)} of {len(cases)} cases, seed {seed}: see the output"
    return verdicts


def say(text: str) -> None:
    """For whoever looks on."""
    sys.stdout.write(text + "\n")


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
    wanted = "drop stall corrupt full reboot power throttle slow runner babble"
    acts = {"adb_kill", "kill", "terminate", "suspend", "release", "hang"}
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


@pytest.mark.timeout(1800)
def test_a_few_faults(tmp_path: Path, build_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNNFARM_CHAOS_PATIENCE", "8")  # beside other tests, on any machine
    scenes, rare = ("push", "run", "lease"), ("ledgers", "hang", "hostile")
    quick = [n for n in range(300) if draw(1, n).calm_s < 5]
    release = next(n for n in quick if "release" in str(draw(1, n).acts))
    first = {scene: next(n for n in quick if draw(1, n).scene == scene) for scene in scenes}
    rarely = {next(n for n in range(300) if draw(1, n).scene == scene) for scene in rare}
    cases = {release, *first.values(), *rarely}
    verdicts = campaign(tmp_path, 1, sorted(cases), build_cache)
    assert {one["scene"] for one in verdicts} == {*scenes, *rare}
    assert sum(one["strikes"] for one in verdicts) >= len(first)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_the_campaign(tmp_path: Path, build_cache: Path) -> None:
    count = cases_with(SEED, FAULTS)
    say(f"seed {SEED}: {count} cases for which {FAULTS} faults are drawn")
    began = time.monotonic()
    verdicts = campaign(tmp_path, SEED, [*range(count)], build_cache, WORKERS)
    minutes = (time.monotonic() - began) / 60
    say(f"seed {SEED}: {count} cases in {minutes:.1f} minutes: {summary(verdicts)}")
    # The others came too late: what they were to befall had ended.
    assert sum(one["strikes"] for one in verdicts) > FAULTS * 0.6
