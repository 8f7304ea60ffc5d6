"""`qnnfarm results` on real databases: what it lists, what it removes, what it says of both."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from harness.exit_codes import NO_ANSWER
from harness.results.alerts import list_alerts
from harness.results.metrics import Measurement
from harness.results.records import (
    ContainerInfo,
    DeviceInfo,
    Provenance,
    Run,
    TelemetrySeries,
    WorkloadRecord,
    new_run_id,
    now,
)
from harness.results.store import ResultsStore
from tests.command_line import Done, qnnfarm

SERIES = [TelemetrySeries("temp_c:cpu", "degC", (0.0, 1.0), (30.0, 31.5))]


def results(folder: Path, *words: str) -> Done:
    return qnnfarm("results", *words, cwd=folder, env={"PATH": "", "COLUMNS": "120"})


@pytest.fixture
def fill(tmp_path: Path) -> Callable[[], Path]:
    """Makes a database of a run that is 100 days old and one of today."""

    def make() -> Path:
        path = tmp_path / "results.db"
        with ResultsStore.open(path) as store:
            for days in (100, 0):
                run = Run(
                    kind="bench",
                    created_at=now() - timedelta(days=days),
                    container=ContainerInfo(
                        model="tiny [bold]llama", sha256="a" * 64, target="SM8750", ars=(1, 32),
                        cl=192, n_splits=2,
                    ),
                    device=DeviceInfo(
                        serial="R5CX", soc="SM8750", emulator=False, ram_bytes=12 << 30,
                        clocks={"cpu_cap_hz:7": 3.53e9, "cpu_max_hz:7": 4.32e9},
                    ),
                    workload=WorkloadRecord(runner="genie-t2t-run", runner_sha256="7" * 64),
                    provenance=Provenance(
                        toolchain="ort_qnn", toolchain_versions={}, library_versions={},
                        qnnfarm_version="0.1.0", host="bench-1",
                    ),
                )  # fmt: skip
                recorder = store.begin_run(run)
                recorder.add_values({"ttft_s": 0.5})
                recorder.add_telemetry(SERIES, repetition=0)
                recorder.finish()
        return path

    return make


def test_ls_lists_runs_by_day_and_container(fill: Callable[[], Path], tmp_path: Path) -> None:
    path = fill()
    done = results(tmp_path, "ls")
    assert (done.returncode, done.stderr) == (0, "")
    heading, old, young, total = done.stdout.splitlines()
    assert heading.startswith("day (UTC)")
    assert old < young
    for word in ("tiny [bold]llama", "a" * 12, "R5CX", "SM8750"):
        assert word in young
    assert total.startswith("2 runs, ")
    found = json.loads(results(tmp_path, "ls", "--json", "--db", str(path)).stdout)
    assert found["size_bytes"] == path.stat().st_size
    assert [one["runs"] for one in found["holdings"]] == [1, 1]


def test_a_dry_run_says_what_the_real_one_does(fill: Callable[[], Path], tmp_path: Path) -> None:
    path = fill()
    before = path.read_bytes()
    dry = results(tmp_path, "prune", "--older-than", "90d", "--dry-run")
    assert (dry.returncode, dry.stdout) == (0, "")
    assert "would remove from results.db" in dry.stderr
    assert "1 run with 1 measurement and telemetry of 1 repetition" in dry.stderr
    assert path.read_bytes() == before
    done = results(tmp_path, "prune", "--older-than", "90d")
    assert done.returncode == 0
    assert done.stderr.startswith("removing from results.db")
    assert done.stdout.startswith("removed 1 run with 1 measurement and telemetry of 1 repetition")
    with ResultsStore.open(path, create=False) as store:
        assert len(store.list_runs()) == 1
    again = json.loads(results(tmp_path, "prune", "--older-than", "90d", "--json").stdout)
    assert (again["runs"], again["dry_run"], again["not_given_back"]) == (0, False, "")


def test_losses_that_nobody_has_looked_for_keep_their_nights(
    fill: Callable[[], Path], tmp_path: Path
) -> None:
    path = fill()
    with ResultsStore.open(path) as store:
        (_, run) = store.list_runs()
        for days in range(40):
            value = Measurement(metric="ttft_s", value=(0.5 if days < 10 else 0.4) + days % 3 / 999)
            at = now() - timedelta(days=days + 1)
            changes = {"id": new_run_id(), "group_id": new_run_id(), "created_at": at}
            changes |= {"status": "done", "measurements": (value,)}
            store.write_run(run.model_copy(update=changes))
    dry = json.loads(results(tmp_path, "prune", "--older-than", "7d", "--dry-run", "--json").stdout)
    done = json.loads(results(tmp_path, "prune", "--older-than", "7d", "--json").stdout)
    assert dry["runs"] == done["runs"] < 30
    with ResultsStore.open(path) as store:
        assert [alert.state for alert in list_alerts(store)] == ["open"]
        assert len(store.list_runs()) > 20


def test_telemetry_alone(fill: Callable[[], Path], tmp_path: Path) -> None:
    path = fill()
    done = results(tmp_path, "prune", "--older-than", "90d", "--keep-measurements")
    assert done.returncode == 0
    assert done.stdout.startswith("removed telemetry of 1 repetition, ")
    with ResultsStore.open(path, create=False) as store:
        old, young = store.list_runs()
        assert old.values("ttft_s") == (0.5,)
        assert store.telemetry(old.id) == ()
        assert store.telemetry(young.id)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls"], "no results database"),
        (["prune", "--older-than", "90d"], "no results database"),
        (["prune", "--older-than", "soon"], "not a time span"),
        (["prune", "--older-than", "9999999d"], "nothing can be that old"),
        (["prune"], "--older-than"),
    ],
)
def test_impossible_requests_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    done = results(tmp_path, *words)
    assert done.returncode == NO_ANSWER
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_names_are_shown_and_never_obeyed(fill: Callable[[], Path], tmp_path: Path) -> None:
    with ResultsStore.open(fill()) as store:
        run = store.list_runs()[0]
        about = run.container.model_copy(update={"model": "evil\x1b[2J\x9b31m\u202e"})
        changes = {"id": new_run_id(), "container": about, "measurements": (), "status": "running"}
        store.begin_run(run.model_copy(update=changes)).finish()
    shown = results(tmp_path, "ls")
    assert "evil\u241b[2J[U+009B]31m[U+202E]" in shown.stdout
    assert shown.stdout.replace("\n", "").isprintable()
    listed = results(tmp_path, "ls", "--json").stdout
    assert listed.replace("\n", "").isprintable()
    assert "evil\x1b[2J\x9b31m\u202e" in {one["model"] for one in json.loads(listed)["holdings"]}


def test_show_opens_what_a_command_prints(fill: Callable[[], Path], tmp_path: Path) -> None:
    with ResultsStore.open(fill()) as store:
        old, young = store.list_runs()
    for identifier in (young.id, young.id[:12], young.group_id, young.group_id[:12].upper()):
        done = results(tmp_path, "show", identifier)
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
    (shown,) = json.loads(results(tmp_path, "show", young.id, "--json").stdout)
    assert shown["id"] == young.id
    assert shown["measurements"][0]["value"] == 0.5


@pytest.mark.parametrize("identifier", ["f" * 32, "fff", "../x", "%%%%", "f" * 100, ""])
def test_show_of_what_is_not_there_is_one_line(
    fill: Callable[[], Path], tmp_path: Path, identifier: str
) -> None:
    fill()
    done = results(tmp_path, "show", identifier)
    assert (done.returncode, done.stdout) == (NO_ANSWER, "")
    (line,) = done.stderr.splitlines()
    assert "no run" in line
