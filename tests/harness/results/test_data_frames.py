"""Results as frames: a row a repetition, and columns that the documentation lists."""

import json
from datetime import timedelta
from pathlib import Path

import pytest

import harness.results
from harness.errors import CorruptRunError, MissingStoreError, StoreUnavailableError
from harness.results import frames
from harness.results.metrics import METRICS, Measurement
from harness.results.records import TelemetrySeries, now
from harness.results.store import ResultsStore, RunFilter
from tests.harness.results.places import Place, SqlitePlace, make_run

DOCS = Path(__file__).parents[3] / "docs" / "analysis.md"


def measured(*speeds: float, warmups: int = 0) -> tuple[Measurement, ...]:
    """Measurements of decode, the first ones warm-ups, and a prompt of 64 tokens."""
    values = [("decode_tokens_per_s", speed) for speed in speeds]
    return (
        *(
            Measurement(
                metric=metric,
                value=value,
                repetition=number if number < warmups else number - warmups,
                is_warmup=number < warmups,
            )
            for number, (metric, value) in enumerate(values)
        ),
        Measurement(metric="prompt_tokens", value=64.0),
    )


@pytest.fixture
def filled(place: Place) -> Place:
    """A benchmark with a warm-up, and a later failed run."""
    with ResultsStore.open(place.location) as store:
        run = make_run(
            id="1" * 32,
            created_at=now() - timedelta(days=2),
            status="done",
            measurements=measured(16.0, 17.5, 18.5, warmups=1),
            labels={"team": "camera"},
        )
        store.write_run(run)
        store.write_run(make_run(id="2" * 32, status="failed", error="it broke"))
    return place


def test_a_row_is_a_repetition_with_its_run(filled: Place) -> None:
    found = frames(filled.location)
    rows = found.repetitions
    assert rows["decode_tokens_per_s"].tolist() == [16.0, 17.5, 18.5]
    assert rows["is_warmup"].tolist() == [True, False, False]
    assert rows["repetition"].tolist() == [0, 0, 1]
    assert rows["prompt_tokens"].tolist()[1] == 64.0
    assert rows["prompt_tokens"].isna().tolist()[2]
    assert set(rows["prompt_tokens_requested"]) == {64}
    assert set(rows["labels.team"]) == {"camera"}
    assert json.loads(rows["ars"][0]) == [1, 32]
    assert found.telemetry.empty


def test_a_failed_run_is_a_row_of_runs(filled: Place) -> None:
    runs = frames(filled.location).runs
    assert runs["id"].tolist() == ["1" * 32, "2" * 32]
    assert runs["status"].tolist() == ["done", "failed"]
    assert runs["error"].tolist()[1] == "it broke"
    assert str(runs["created_at"].dtype) == "datetime64[us, UTC]"
    assert str(runs["cl"].dtype) == "Int64"
    assert str(runs["emulator"].dtype) == "boolean"


def test_a_filter_chooses_runs(filled: Place) -> None:
    recent = frames(filled.location, RunFilter(since=now() - timedelta(days=1)))
    assert recent.runs["id"].tolist() == ["2" * 32]
    assert recent.repetitions.empty
    nothing = frames(filled.location, RunFilter(model="no such"))
    assert (nothing.runs.empty, nothing.repetitions.empty) == (True, True)
    assert "model" in nothing.repetitions.columns


def test_telemetry_is_a_row_a_sample(place: Place) -> None:
    run = make_run()
    series = TelemetrySeries("temp_c:cpu", "degC", (-0.5, 0.0, 0.5), (40.0, None, 41.0))
    with ResultsStore.open(place.location) as store, store.recording(run) as recorder:
        recorder.add_telemetry([series], repetition=0)
    samples = frames(place.location, telemetry=True).telemetry
    assert samples["t_s"].tolist() == pytest.approx([-0.5, 0.0, 0.5])
    assert samples["value"].isna().tolist() == [False, True, False]
    assert samples["channel"].unique().tolist() == ["temp_c:cpu"]


def test_a_run_without_a_living_writer_is_interrupted(place: Place) -> None:
    with ResultsStore.open(place.location) as store:
        store.begin_run(make_run())
    live = frames(place.location).runs["status"].tolist()
    place.run("UPDATE runs SET writer = (SELECT replace(writer, ':', ':') || '0' FROM runs)")
    assert (live, frames(place.location).runs["status"].tolist()) == (["running"], ["interrupted"])


def test_every_column_is_documented(filled: Place) -> None:
    found = frames(filled.location, telemetry=True)
    columns = {*found.repetitions, *found.runs, *found.telemetry} - METRICS.keys()
    text = DOCS.read_text(encoding="utf-8")
    named = {"labels.team": "labels.KEY"}
    assert [name for name in columns if f"`{named.get(name, name)}`" not in text] == []


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingStoreError):
        frames(tmp_path / "none.db")
    place = SqlitePlace(tmp_path / "results.db")
    with ResultsStore.open(place.location) as store:
        store.write_run(make_run(measurements=measured(1.0)))
    place.run("UPDATE measurements SET value = 'fast'")
    with pytest.raises(StoreUnavailableError, match="cannot be read"):
        frames(place.location)
    place.run("UPDATE measurements SET value = 1.0, metric = 'no_such' WHERE metric LIKE 'dec%'")
    with pytest.raises(CorruptRunError, match="no_such"):
        frames(place.location)


def test_the_package_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        _ = harness.results.no_such
