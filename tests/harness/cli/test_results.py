"""`qnnfarm results` on real databases: what it lists, what it removes, what it says of both."""

import json
from datetime import timedelta
from pathlib import Path

import pytest

from harness.errors import NO_ANSWER
from harness.results.alerts import list_alerts
from harness.results.metrics import Measurement
from harness.results.records import (
    DeviceInfo,
    TelemetrySeries,
    WorkloadRecord,
    new_run_id,
    now,
)
from harness.results.store import ResultsStore
from tests.harness.cli.conftest import Run
from tests.harness.results.places import make_run, write_runs

SERIES = [TelemetrySeries("temp_c:cpu", "degC", (0.0, 1.0), (30.0, 31.5))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database of a run that is 100 days old and one of today."""
    path = tmp_path / "results.db"
    clocks = {"cpu_cap_hz:7": 3.53e9, "cpu_max_hz:7": 4.32e9}
    with ResultsStore.open(path) as store:
        for days in (100, 0):
            run = make_run(created_at=now() - timedelta(days=days))
            changes = {
                "container": run.container.model_copy(update={"model": "tiny [bold]llama"}),
                "device": DeviceInfo(
                    serial="R5CX", soc="SM8750", emulator=False, ram_bytes=12 << 30, clocks=clocks
                ),
                "workload": WorkloadRecord(runner="genie-t2t-run", runner_sha256="7" * 64),
            }
            recorder = store.begin_run(run.model_copy(update=changes))
            recorder.add_values({"ttft_s": 0.5})
            recorder.add_telemetry(SERIES, repetition=0)
            recorder.finish()
    return path


def test_ls_lists_runs_by_day_and_container(qnnfarm: Run, path: Path) -> None:
    done = qnnfarm("results", "ls")
    assert (done.returncode, done.stderr) == (0, "")
    heading, old, young, total = done.stdout.splitlines()
    assert heading.startswith("day (UTC)")
    assert old < young
    for word in ("tiny [bold]llama", "a" * 12, "R5CX", "SM8750"):
        assert word in young
    assert total.startswith("2 runs, ")
    found = json.loads(qnnfarm("results", "ls", "--json", "--db", str(path)).stdout)
    assert found["size_bytes"] == path.stat().st_size
    assert [one["runs"] for one in found["holdings"]] == [1, 1]


def test_a_dry_run_says_what_the_real_one_does(qnnfarm: Run, path: Path) -> None:
    before = path.read_bytes()
    dry = qnnfarm("results", "prune", "--older-than", "90d", "--dry-run")
    assert (dry.returncode, dry.stdout) == (0, "")
    assert "would remove from results.db" in dry.stderr
    assert "1 run with 1 measurement and telemetry of 1 repetition" in dry.stderr
    assert path.read_bytes() == before
    done = qnnfarm("results", "prune", "--older-than", "90d")
    assert done.returncode == 0
    assert done.stderr.startswith("removing from results.db")
    assert done.stdout.startswith("removed 1 run with 1 measurement and telemetry of 1 repetition")
    with ResultsStore.open(path, create=False) as store:
        assert len(store.list_runs()) == 1
    again = json.loads(qnnfarm("results", "prune", "--older-than", "90d", "--json").stdout)
    assert (again["runs"], again["dry_run"], again["not_given_back"]) == (0, False, "")


def test_losses_that_nobody_has_looked_for_keep_their_nights(qnnfarm: Run, path: Path) -> None:
    with ResultsStore.open(path) as store:
        (_, run) = store.list_runs()
        runs = []
        for days in range(40):
            value = Measurement(metric="ttft_s", value=(0.5 if days < 10 else 0.4) + days % 3 / 999)
            at = now() - timedelta(days=days + 1)
            changes = {"id": new_run_id(), "group_id": new_run_id(), "created_at": at}
            changes |= {"status": "done", "measurements": (value,)}
            runs.append(run.model_copy(update=changes))
        write_runs(store, runs)
    dry = json.loads(
        qnnfarm("results", "prune", "--older-than", "7d", "--dry-run", "--json").stdout
    )
    done = json.loads(qnnfarm("results", "prune", "--older-than", "7d", "--json").stdout)
    assert dry["runs"] == done["runs"] < 30
    with ResultsStore.open(path) as store:
        assert [alert.state for alert in list_alerts(store)] == ["open"]
        assert len(store.list_runs()) > 20


def test_telemetry_alone(qnnfarm: Run, path: Path) -> None:
    done = qnnfarm("results", "prune", "--older-than", "90d", "--keep-measurements")
    assert done.returncode == 0
    assert done.stdout.startswith("removed telemetry of 1 repetition, ")
    with ResultsStore.open(path, create=False) as store:
        old, young = store.list_runs()
        assert old.values("ttft_s") == (0.5,)
        assert store.telemetry(old.id) == ()
        assert store.telemetry(young.id)


def test_show_opens_what_a_command_prints(qnnfarm: Run, path: Path) -> None:
    with ResultsStore.open(path) as store:
        old, young = store.list_runs()
    for identifier in (young.id, young.id[:12], young.group_id, young.group_id[:12].upper()):
        done = qnnfarm("results", "show", identifier)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert lines[0] == f"bench {young.id}: done"
        assert any(line.split()[:2] == ["device", "R5CX,"] for line in lines)
        assert any(line.startswith("Time to first token  500 ms") for line in lines)
        facts = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.strip()}
        assert facts["memory"] == "12.0 GiB"
        assert facts["clocks"] == "CPU 7 3.53 GHz, at most 4.32 GHz"
        assert facts["runner"] == f"genie-t2t-run {'7' * 12}"
        assert old.id not in done.stdout
    (shown,) = json.loads(qnnfarm("results", "show", young.id, "--json").stdout)
    assert shown["id"] == young.id
    assert shown["measurements"][0]["value"] == 0.5


@pytest.mark.parametrize("identifier", ["f" * 32, "../x", ""])
def test_show_of_what_is_not_there_is_one_line(qnnfarm: Run, path: Path, identifier: str) -> None:
    done = qnnfarm("results", "show", identifier)
    assert (done.returncode, done.stdout) == (NO_ANSWER, "")
    (line,) = done.stderr.splitlines()
    assert "no run" in line
