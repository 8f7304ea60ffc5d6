"""Mutated models: refused in one line, or built into what they compute. Never anything else.

Cases run in child processes, so that a crash or a hang of whatever library is a failure of its
case. `make fuzz` runs the campaign; `QNNFARM_FUZZ_SEED`, `QNNFARM_FUZZ_CASES` and
`QNNFARM_FUZZ_WORKERS` change it, and `QNNFARM_FUZZ_LOG` names a file for every verdict. One case
is run again with `python -m tests.fuzz.worker WORK SEED COMPILE_EVERY CASE`.
"""

import io
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest

SEED = int(os.environ.get("QNNFARM_FUZZ_SEED", "20"))
CASES = int(os.environ.get("QNNFARM_FUZZ_CASES", "5000"))
WORKERS = int(os.environ.get("QNNFARM_FUZZ_WORKERS", "2"))
LOG = os.environ.get("QNNFARM_FUZZ_LOG", os.devnull)
FEW = 20
COMPILE_EVERY = 20
"""Of the cases that reach the compiler, about one in five, one in so many goes through it."""
_ROOT = Path(__file__).parents[2]
_CASE_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 120.0


class Worker:
    """A child that runs cases, and is replaced when it dies or hangs."""

    def __init__(
        self, work: Path, seed: int, compile_every: int, cases: Iterable[int], verdicts: IO[str]
    ) -> None:
        self._command = [sys.executable, "-m", "tests.fuzz.worker", str(work), str(seed)]
        self._command.append(str(compile_every))
        self._left = list(cases)
        self._verdicts = verdicts
        self._log = work.with_suffix(".log")

    def run(self) -> list[dict[str, Any]]:
        """The verdicts of all cases."""
        verdicts: list[dict[str, Any]] = []
        while self._left:
            verdicts += self._run_until_it_ends()
        return verdicts

    def _note(self, verdict: dict[str, Any]) -> dict[str, Any]:
        self._left.remove(verdict["case"])
        self._verdicts.write(json.dumps(verdict) + "\n")
        return verdict

    def _run_until_it_ends(self) -> list[dict[str, Any]]:
        verdicts: list[dict[str, Any]] = []
        with self._log.open("ab") as log:
            command = [*self._command, *map(str, self._left)]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=_ROOT)
        assert child.stdout is not None
        running = None
        try:
            while self._left:
                line = read_line(
                    child.stdout, _CASE_TIMEOUT_S if running is not None else _START_TIMEOUT_S
                )
                if line.startswith(b"begin "):
                    running = int(line.split()[1])
                elif line.endswith(b"\n"):
                    verdicts.append(self._note(json.loads(line)))
                else:
                    fault = "it hangs" if is_alive(child) else "the process died"
                    assert running is not None, self._log.read_text()[-2000:]
                    ended = {"case": running, "did": [], "outcome": "", "fault": fault}
                    verdicts.append(self._note(ended))
                    break
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        return verdicts


def is_alive(child: subprocess.Popen[bytes]) -> bool:
    """Return whether a silent child lives; one that closed its pipe may need a moment."""
    try:
        child.wait(0.5)
    except subprocess.TimeoutExpired:
        return True
    return False


def read_line(pipe: IO[bytes], timeout_s: float) -> bytes:
    """A line with its end; without one when the pipe closed or the time is up."""
    line = b""
    deadline = time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            break
        part = os.read(pipe.fileno(), 1)
        if not part:
            break
        line += part
    return line


def campaign(
    work: Path, seed: int, n_cases: int, compile_every: int, n_workers: int = 1
) -> Counter[str]:
    """Run cases of a seed; how often each outcome came.

    Raises:
        AssertionError: a case ended otherwise than it may, with all that is needed to run it again.
    """
    with Path(LOG).open("a", buffering=1) as log, ThreadPoolExecutor(n_workers) as pool:
        workers = [
            Worker(work / f"{i}", seed, compile_every, range(i, n_cases, n_workers), log)
            for i in range(n_workers)
        ]
        verdicts = [one for found in pool.map(Worker.run, workers) for one in found]
    faults = [one for one in verdicts if one["fault"]]
    for one in faults:
        sys.stdout.write(f"seed {seed} case {one['case']} {one['did']}: {one['fault']}\n")
    assert sorted(one["case"] for one in verdicts) == list(range(n_cases))
    assert not faults, f"{len(faults)} of {n_cases} cases, seed {seed}: see the output"
    return Counter(one["outcome"] for one in verdicts)


@pytest.mark.needs("libatomic1")
def test_a_few_mutations(tmp_path: Path) -> None:
    outcomes = campaign(tmp_path, 1, FEW, compile_every=1 << 30)
    assert outcomes["refused"] > FEW // 3
    assert outcomes["built"] > 1


def test_a_worker_that_dies_or_hangs_is_told_by_its_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os, sys, time\n"
        "for case in map(int, sys.argv[1:]):\n"
        "    print('begin', case, flush=True)\n"
        "    if case == 1: os.abort()\n"
        "    if case == 2: time.sleep(60)\n"
        '    print(\'{"case": %d, "did": [], "outcome": "refused", "fault": ""}\' % case, '
        "flush=True)\n"
    )
    worker = Worker(tmp_path / "work", 0, 1, range(4), io.StringIO())
    worker._command = [sys.executable, "-c", program]
    monkeypatch.setattr(sys.modules[__name__], "_CASE_TIMEOUT_S", 3.0)
    found = {one["case"]: one["fault"] for one in worker.run()}
    assert found == {0: "", 1: "the process died", 2: "it hangs", 3: ""}


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_the_campaign(tmp_path: Path) -> None:
    began = time.monotonic()
    outcomes = campaign(tmp_path, SEED, CASES, COMPILE_EVERY, WORKERS)
    minutes = (time.monotonic() - began) / 60
    sys.stdout.write(f"seed {SEED}: {CASES} cases in {minutes:.1f} minutes: {dict(outcomes)}\n")
    assert outcomes["refused"] > CASES // 4
    assert outcomes["built"] > CASES // 20
