"""Mutated models: refused in one line, or built into what they compute. Never anything else.

Each case runs in a child process, so that a crash or a hang of whatever library is a failure of
that case. `QNNFARM_FUZZ_SEED` and `QNNFARM_FUZZ_CASES` change the campaign of

    pytest -n 0 -m slow tests/fuzz

and one case is run again with `python -m tests.fuzz.worker WORK SEED COMPILE_EVERY CASE`.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

import pytest

SEED = int(os.environ.get("QNNFARM_FUZZ_SEED", "20"))
CASES = int(os.environ.get("QNNFARM_FUZZ_CASES", "5000"))
FEW = 40
COMPILE_EVERY = 150
"""One case in so many is compiled, if it gets there; about one in four does."""
_ROOT = Path(__file__).parents[2]
_CASE_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 120.0


class Worker:
    """A child that runs cases, and is replaced when it dies or hangs."""

    def __init__(self, work: Path, seed: int, compile_every: int, cases: list[int]) -> None:
        self._command = [sys.executable, "-m", "tests.fuzz.worker", str(work), str(seed)]
        self._command.append(str(compile_every))
        self._left = list(cases)
        self._log = work.with_suffix(".log")

    def run(self) -> list[dict[str, Any]]:
        """The verdicts of all cases."""
        verdicts: list[dict[str, Any]] = []
        while self._left:
            verdicts += self._run_until_it_ends()
        return verdicts

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
                    verdicts.append(json.loads(line))
                    self._left.remove(verdicts[-1]["case"])
                else:
                    fault = "it hangs" if is_alive(child) else "the process died"
                    assert running is not None, self._log.read_text()[-2000:]
                    self._left.remove(running)
                    verdicts.append({"case": running, "did": [], "outcome": "", "fault": fault})
                    break
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        return verdicts


def is_alive(child: subprocess.Popen[bytes]) -> bool:
    """Whether a child that says nothing lives; one that has closed its pipe may need a moment."""
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


def campaign(work: Path, seed: int, cases: list[int], compile_every: int) -> Counter[str]:
    """Run cases; how often each outcome came.

    Raises:
        AssertionError: a case ended otherwise than it may, with all that is needed to run it again.
    """
    verdicts = Worker(work, seed, compile_every, cases).run()
    faults = [one for one in verdicts if one["fault"]]
    for one in faults:
        sys.stdout.write(f"seed {seed} case {one['case']} {one['did']}: {one['fault']}\n")
    assert sorted(one["case"] for one in verdicts) == cases
    assert not faults, f"{len(faults)} of {len(cases)} cases, seed {seed}: see the output"
    return Counter(one["outcome"] for one in verdicts)


def test_a_few_mutations(tmp_path: Path) -> None:
    outcomes = campaign(tmp_path / "work", 1, list(range(FEW)), compile_every=1000)
    assert outcomes["refused"] > FEW // 3
    assert outcomes["built"] > 2


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
    worker = Worker(tmp_path / "work", 0, 1, [0, 1, 2, 3])
    worker._command = [sys.executable, "-c", program]
    monkeypatch.setattr(sys.modules[__name__], "_CASE_TIMEOUT_S", 3.0)
    found = {one["case"]: one["fault"] for one in worker.run()}
    assert found == {0: "", 1: "the process died", 2: "it hangs", 3: ""}


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_the_campaign(tmp_path: Path) -> None:
    outcomes = campaign(tmp_path / "work", SEED, list(range(CASES)), COMPILE_EVERY)
    sys.stdout.write(f"seed {SEED}: {dict(outcomes)}\n")
    assert outcomes["refused"] > CASES // 4
    assert outcomes["built"] > CASES // 20
