"""A writer that is killed at any moment loses the cell in flight, and nothing else.

A child process measures cell after cell, as a plan does, and prints a cell's id once its `finish`
has returned. SIGKILL comes at a random moment of that.
"""

import random
import signal
import sys
import time
from pathlib import Path

import pytest

from harness.results import frames
from harness.results.artifacts import ArtifactFolder
from harness.results.store import ResultsStore, RunFilter
from tests.command_line import Started
from tests.harness.results.places import Place, SqlitePlace

ROOT = Path(__file__).parents[3]
REPETITIONS = 3
STEPS = 13
"""Steps of a cell: it begins, ten writes, it is finished, and its id is printed."""
WRITER = f"""
import os, sys
from harness.results.records import TelemetrySeries
from harness.results.store import ResultsStore
from tests.harness.results.places import make_run

def step(text="."):
    print(text, flush=True)

series = TelemetrySeries("temp_c:cpu", "degC", (0.0, 0.1), (40.0, 41.0))
with ResultsStore.open(sys.argv[1]) as store:
    while True:
        run = make_run()
        with store.recording(run) as recorder:
            step()
            recorder.add_library_versions({{"libGenie.so": "1"}})
            step()
            for number in range({REPETITIONS}):
                values = {{"decode_tokens_per_s": 17.5 + number, "ttft_s": 0.5}}
                recorder.add_values(values, repetition=number, is_warmup=True)
                step()
                recorder.add_telemetry([series], repetition=number, is_warmup=True)
                step()
            recorder.settle_warmup(0, detected=True)
            step()
            recorder.add_artifact("id", run.id.encode() + os.urandom(5000))
            step()
            recorder.set_check("passed", "as before")
            step()
        step()
        step(run.id)
"""


def kill_one(location: str, steps: int, share: float) -> list[str]:
    """Kill a writer, and return the ids of the cells that it finished.

    Args:
        steps: that it takes before, so that slow machines are hit at the same moments as fast ones.
        share: of the time of a step, after the last of them.
    """
    with Started("-c", WRITER, location, cwd=ROOT) as writer:
        said = [writer.stdout.readline()]
        for _ in range(steps):
            before = time.monotonic()
            said.append(writer.stdout.readline())
        time.sleep(share * (time.monotonic() - before))
        writer.kill()
        said += writer.stdout.read().splitlines()
        assert writer.wait() == -signal.SIGKILL
    return [line.strip() for line in said if len(line.strip()) == 32]


def check(place: Place, finished: set[str], kills: int, whole: set[str]) -> int:
    """Check that all of the finished cells are whole, and return how many were in flight.

    Args:
        whole: cells that an earlier check read in full; it adds those that it reads.
    """
    if isinstance(place, SqlitePlace):
        assert place.rows("PRAGMA integrity_check") == [("ok",)]
    with ResultsStore.open(place.location) as store:
        done = store.list_runs(RunFilter(status="done"))
        # A cell that was stored, and killed before it was printed, is no loss.
        assert finished <= {run.id for run in done}
        assert len(done) - len(finished) <= kills
        folder = ArtifactFolder.of(store.location)
        for run in (run for run in done if run.id not in whole):
            assert len(run.values("decode_tokens_per_s")) == REPETITIONS
            assert len(store.telemetry(run.id)) == REPETITIONS
            (artifact,) = store.artifacts(run.id)
            assert folder.read(artifact.sha256).startswith(run.id.encode())
            whole.add(run.id)
        left = store.list_runs(RunFilter(status="interrupted"))
        assert store.list_runs(RunFilter(status="running")) == ()
        assert len(left) <= kills
        assert len(done) + len(left) == len(store.list_runs())
    assert set(frames(place.location).runs["status"]) <= {"done", "interrupted"}
    return len(left)


def campaign(place: Place, kills: int, seed: int) -> tuple[int, int]:
    """Kill writers of one database; return the cells that were kept, and those in flight."""
    rng = random.Random(seed)  # noqa: S311
    finished, whole = set[str](), set[str]()
    for number in range(kills):
        steps = rng.randrange(1, 2 * STEPS)
        finished.update(kill_one(place.location, steps, 2 * rng.random()))
        left = check(place, finished, number + 1, whole)
    return len(finished), left


@pytest.fixture(autouse=True)
def shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNNFARM_ARTIFACTS_DIR", str(tmp_path / "shared"))


def test_a_killed_writer_loses_the_cell_in_flight_alone(place: Place) -> None:
    campaign(place, 2, seed=time.time_ns() % 1_000_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_writers_killed_at_a_hundred_moments(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, in_flight = campaign(place, 100, seed=10)
    with capsys.disabled():
        sys.stdout.write(f"\n{place.engine}: {kept} cells kept, {in_flight} in flight lost\n")
    assert kept >= 20
    assert in_flight >= 20
