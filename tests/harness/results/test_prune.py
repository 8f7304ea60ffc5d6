"""What is old goes, with all that belongs to it; what stays is read and reported as before."""

import secrets
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from harness.results import alerts, maintenance
from harness.results.maintenance import (
    KeptCounts,
    PruneCounts,
    PrunePolicy,
    count_kept,
    count_prunable,
    disk_usage,
    free_disk_space,
    list_inventory,
)
from harness.results.metrics import Measurement
from harness.results.perplexity import PERPLEXITY, REFERENCES
from harness.results.provenance import this_writer
from harness.results.records import PerplexityDefinition, Run, TelemetrySeries, WorkloadRecord, now
from harness.results.run_recorder import RunRecorder
from harness.results.store import ResultsStore
from harness.workloads.quality import stored_quality
from reports import document, page
from tests.harness.results.places import Place, SqlitePlace, make_run, write_runs

NOW = datetime(2026, 6, 1, tzinfo=UTC)
OLD = NOW - timedelta(days=90)
SERIES = [TelemetrySeries("temp_c:cpu", "degC", (0.0, 1.0), (30.0, 31.5))]
DEFINED = PerplexityDefinition(positions="first_cl_minus_ar", windows=1, tokens=96)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "PAUSE_S", 0.0)
    monkeypatch.setattr(maintenance, "GROUPS_AT_ONCE", 2)


def add(store: ResultsStore, run: Run, repetitions: int = 1, *, telemetry: bool = True) -> None:
    """A run with its measurements and telemetry, however it ended."""
    values = tuple(
        Measurement(metric="decode_tokens_per_s", value=10.0 + number, repetition=number)
        for number in range(repetitions)
    )
    changes = {"status": "running", "error": None, "measurements": values}
    recorder = store.begin_run(run.model_copy(update=changes))
    for number in range(repetitions if telemetry else 0):
        recorder.add_telemetry(SERIES, repetition=number)
    recorder.generated_text = "light"
    if run.status != "running":
        recorder.finish(run.status, error=run.error)


def made(days_old: float, **changes: object) -> Run:
    at = NOW - timedelta(days=days_old)
    return make_run(**{"status": "done", "created_at": at, **changes})


def removed_by(store: ResultsStore, wanted: PrunePolicy) -> PruneCounts:
    planned = count_prunable(store.database, wanted)
    removed = sum(maintenance.prune(store.database, wanted), PruneCounts())
    assert removed == planned
    assert count_prunable(store.database, wanted) == PruneCounts()
    return removed


def test_old_runs_go_with_all_that_hangs_on_them(place: Place, store: ResultsStore) -> None:
    for days in (200, 150, 100, 91, 89, 1):
        add(store, made(days), 3)
    add(store, made(120, status="failed", error="it went away"))
    removed = removed_by(store, PrunePolicy(OLD))
    assert (removed.runs, removed.measurements, removed.telemetry) == (5, 13, 13)
    assert removed.telemetry_bytes > 13 * 10
    assert len(store.list_runs()) == 2
    for table in ("measurements", "telemetry"):
        assert place.rows(f"SELECT count(*) FROM {table}") == [(6,)]  # noqa: S608


def test_telemetry_alone(place: Place, store: ResultsStore) -> None:
    old, young = made(100), made(10)
    for run in (old, young):
        add(store, run, 2)
    before = store.list_runs()
    removed = removed_by(store, PrunePolicy(OLD, only_telemetry=True))
    assert (removed.runs, removed.measurements, removed.telemetry) == (0, 0, 2)
    assert store.list_runs() == before
    assert store.telemetry(old.id) == ()
    assert len(store.telemetry(young.id)) == 2
    assert place.rows("SELECT count(*) FROM telemetry") == [(2,)]


def test_sessions_of_a_group_are_removed_together(store: ResultsStore) -> None:
    """Half a comparison would be another comparison."""
    for days, group in ((100, "a" * 32), (80, "a" * 32), (100, "b" * 32), (95, "b" * 32)):
        add(store, made(days, group_id=group))
    assert removed_by(store, PrunePolicy(OLD)).runs == 2
    assert {run.group_id for run in store.list_runs()} == {"a" * 32}


def test_running_runs_stay_and_dead_ones_are_removed(place: Place, store: ResultsStore) -> None:
    here, elsewhere, dead = (made(100, status="running") for _ in range(3))
    for run in (here, elsewhere, dead):
        add(store, run)
    gone = this_writer().rpartition(":")[0] + ":0"  # this process began at another time
    place.run(f"UPDATE runs SET writer = 'boot:1:2:3' WHERE id = '{elsewhere.id}'")  # noqa: S608
    place.run(f"UPDATE runs SET writer = '{gone}' WHERE id = '{dead.id}'")  # noqa: S608
    assert removed_by(store, PrunePolicy(OLD)).runs == 2
    assert {run.id for run in store.list_runs()} == {here.id}


def test_perplexities_that_check_benchmarks_stay(store: ResultsStore) -> None:
    workload = WorkloadRecord(runner="genie_t2t_run.py", perplexity=DEFINED)
    run = made(300, kind="perplexity", workload=workload)
    lost = made(300, kind="perplexity", workload=workload, status="failed", error="away")
    add(store, lost)
    recorder = store.begin_run(run.model_copy(update={"status": "running"}))
    values = {PERPLEXITY: 9.0, **dict.fromkeys(REFERENCES, 9.0)}
    recorder.add_values(values)
    recorder.finish()
    add(store, made(250))

    def known() -> object:
        return stored_quality(store, run.container, run.device)

    before = known()
    assert before is not None
    assert count_kept(store.database, PrunePolicy(OLD)) == KeptCounts(perplexities=1)
    assert removed_by(store, PrunePolicy(OLD)).runs == 2
    assert known() == before


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_nights_of_an_open_alert_stay_until_it_is_settled(store: ResultsStore) -> None:
    runs = []
    for days in range(160, 60, -1):
        rate = 50.0 + days % 3 / 10 if days > 130 else 45.0 + days % 3 / 10
        value = Measurement(metric="decode_tokens_per_s", value=rate)
        runs.append(made(days, measurements=(value,)))
    write_runs(store, runs)
    (alert,) = alerts.review_new(store)
    assert alert.began_at == NOW - timedelta(days=130)
    assert count_kept(store.database, PrunePolicy(OLD)) == KeptCounts(of_alerts=28)
    assert removed_by(store, PrunePolicy(OLD)).runs == 70 - 28
    ages = [(NOW - run.created_at).days for run in store.list_runs()]
    assert ages == [*range(144, 116, -1), *range(90, 60, -1)]
    # Its figure is that of all nights, and a recovery can still be told.
    alerts.review_new(store)
    (still,) = alerts.list_alerts(store)
    assert (still.id, still.ratio, still.state) == (alert.id, alert.ratio, "open")

    alerts.set_state(store, [alert.id], "expected")
    assert count_kept(store.database, PrunePolicy(OLD)) == KeptCounts()
    assert removed_by(store, PrunePolicy(OLD)).runs == 28


def test_writers_come_between_transactions_and_a_group_that_goes_on_stays(
    place: Place, store: ResultsStore
) -> None:
    """Between two transactions nothing is locked: the writer would wait for us in vain."""
    groups = [secrets.token_hex(16) for _ in range(7)]
    for number, group in enumerate(groups):
        add(store, made(200 - number, group_id=group))
    with ResultsStore.open(place.location, busy_timeout_s=5.0) as nightly:
        removing = maintenance.prune(store.database, PrunePolicy(OLD))
        amounts = [next(removing)]
        assert amounts[0].runs == 2
        add(nightly, made(0, group_id=groups[-1]))  # a plan goes on after all
        for amount in removing:
            add(nightly, made(0))
            amounts.append(amount)
    assert [amount.runs for amount in amounts] == [2, 2, 2, 0]
    assert sum(run.group_id == groups[-1] for run in store.list_runs()) == 2


def test_a_prune_that_was_cut_off_goes_on_later(store: ResultsStore) -> None:
    for days in range(100, 110):
        add(store, made(days))
    with closing(maintenance.prune(store.database, PrunePolicy(OLD))) as removing:
        next(removing)
    assert len(store.list_runs()) == 8
    assert removed_by(store, PrunePolicy(OLD)).runs == 8


def test_a_damaged_telemetry_is_removed_like_any(place: Place, store: ResultsStore) -> None:
    add(store, made(100))
    damaged = "'text'" if place.engine == "sqlite" else "''::bytea"
    place.run(f"UPDATE telemetry SET samples = {damaged}")  # noqa: S608
    assert removed_by(store, PrunePolicy(OLD, only_telemetry=True)).telemetry == 1


def _several_runs() -> Iterator[tuple[Run, int, bool]]:
    """Runs with their repetitions, and whether they have telemetry."""
    for number, (days, group, label, kind, status, repetitions, telemetry) in enumerate(
        (
            (300, "a", "", "perplexity", "done", 1, False),
            (300, "a", "A", "bench", "done", 3, True),
            (300, "b", "B", "bench", "failed", 0, False),
            (120, "c", "cell", "generate", "interrupted", 2, True),
            (120, "d", "A", "bench", "done", 2, True),
            (91, "d", "B", "bench", "done", 2, False),
            (91, "e", "", "perplexity", "failed", 0, False),
            (89, "c", "cell", "bench", "done", 1, True),
            (1, "f", "", "bench", "done", 3, True),
        )
    ):
        changes: dict[str, object] = {
            "kind": kind, "label": label, "group_id": group * 32, "session": number,
            "status": status, "error": "it went away" if status == "failed" else None,
        }  # fmt: skip
        if kind == "perplexity":
            changes["workload"] = WorkloadRecord(runner="genie_t2t_run.py", perplexity=DEFINED)
        yield made(days + number / 1000, **changes), repetitions, telemetry


def test_what_stays_is_read_and_reported_as_if_nothing_else_had_been(tmp_path: Path) -> None:
    runs = list(_several_runs())
    stays = {runs[number][0].id for number in (0, 3, 7, 8)}
    for name in ("pruned", "clean"):
        with ResultsStore.open(tmp_path / f"{name}.db") as store:
            for run, repetitions, telemetry in runs:
                if name == "pruned" or run.id in stays:
                    add(store, run, repetitions, telemetry=telemetry)
    with ResultsStore.open(tmp_path / "pruned.db") as store:
        before = {run.id: (run, store.telemetry(run.id)) for run in store.list_runs()}
        removed_by(store, PrunePolicy(OLD))
        assert free_disk_space(store.database) == ""
        after = {run.id: (run, store.telemetry(run.id)) for run in store.list_runs()}
    assert after == {run_id: what for run_id, what in before.items() if run_id in stays}
    pruned, clean = (
        _without_times(document.to_document(page.compose(page.load(str(tmp_path / name))), ""))
        for name in ("pruned.db", "clean.db")
    )
    assert pruned == clean


def _without_times(value: object) -> object:
    """Both databases were written at moments of their own."""
    if isinstance(value, dict):
        return {key: _without_times(one) for key, one in value.items() if key != "finished_at"}
    return [_without_times(one) for one in value] if isinstance(value, list) else value


def test_a_file_shrinks_at_first_as_a_whole_and_then_in_pieces(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path / "results.db")
    noise = [
        TelemetrySeries(
            "temp_c:cpu", "degC", tuple(map(float, range(3000))),
            tuple(secrets.randbelow(10**9) / 7 for _ in range(3000)),
        )
    ]  # fmt: skip
    sizes = []
    with ResultsStore.open(place.location) as store:
        for days in (300, 200, 100):
            run = made(days, status="running")
            recorder = store.begin_run(run)
            for number in range(20):
                recorder.add_telemetry(noise, repetition=number)
            recorder.finish()
        sizes.append(place.path.stat().st_size)
        for days in (250, 150):
            removed_by(store, PrunePolicy(NOW - timedelta(days=days), only_telemetry=True))
            assert disk_usage(store.database).free_bytes > 200_000
            assert free_disk_space(store.database) == ""
            assert disk_usage(store.database).free_bytes == 0
            assert place.path.stat().st_size == disk_usage(store.database).total_bytes
            sizes.append(place.path.stat().st_size)
        assert free_disk_space(store.database) == ""
    assert sizes[1] < sizes[0] - 200_000
    assert sizes[2] < sizes[1] - 200_000
    assert place.rows("PRAGMA integrity_check") == [("ok",)]
    assert place.rows("PRAGMA auto_vacuum") == [(2,)]


def test_a_file_is_not_written_anew_under_a_run(place: Place, store: ResultsStore) -> None:
    for number in range(4):
        add(store, made(100 + number), 30, telemetry=False)
    nightly = made(0, status="running", created_at=now())
    add(store, nightly)
    removed_by(store, PrunePolicy(OLD))
    said = free_disk_space(store.database)
    if place.engine == "sqlite":
        assert "a run is under way" in said
        assert disk_usage(store.database).free_bytes > 0
        RunRecorder(store.database, nightly).finish()
        assert free_disk_space(store.database) == ""
    else:
        assert "VACUUM FULL" in said
    assert len(store.list_runs()) == 1


def test_a_file_that_another_writes_to_keeps_its_room_for_later(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path / "results.db")
    with ResultsStore.open(place.location, busy_timeout_s=0.01) as store:
        for number in range(4):
            add(store, made(100 + number), 30, telemetry=False)
        removed_by(store, PrunePolicy(OLD))
        with place.held():
            assert "locked" in free_disk_space(store.database)
        assert free_disk_space(store.database) == ""


def test_holdings_by_day_container_and_device(store: ResultsStore) -> None:
    late = NOW.replace(hour=23, minute=59)
    group = "a" * 32
    add(store, make_run(created_at=late, status="done", group_id=group, label="A"), 2)
    add(store, make_run(created_at=late, status="done", group_id=group, label="B"))
    add(store, make_run(created_at=late + timedelta(minutes=2), status="failed", error="away"))
    work = WorkloadRecord(runner="graph_run.py", sampler={"runtime": "graph"})
    add(store, make_run(created_at=late - timedelta(days=1), status="done", workload=work))
    add(store, make_run(created_at=late - timedelta(days=1), status="done"))
    genie, graph, first, second = list_inventory(store.database)
    assert (genie.runtime, graph.runtime, graph.runs) == ("genie", "graph", 1)
    assert (first.day, second.day) == (late.date(), late.date() + timedelta(days=1))
    assert (first.sessions, first.runs, first.done) == (1, 2, 2)
    assert (second.sessions, second.runs, second.done) == (1, 1, 0)
    assert first.telemetry_bytes > second.telemetry_bytes > 0
    assert (first.model, first.device_serial, first.emulator) == (
        "tiny_llama", "127.0.0.1:5555", True,
    )  # fmt: skip
