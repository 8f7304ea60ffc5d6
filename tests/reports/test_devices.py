"""Use and health of devices, as the page of devices shows them."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from harness.results.device_health import DeviceEvent, DeviceHealth
from harness.results.records import Condition, RunMeans
from harness.results.store import ResultsStore
from reports import page
from reports.devices import MOST_EVENTS, device_figures, find_device_use
from reports.errors import ReportError
from tests.harness.results.places import write_runs
from tests.reports import lab
from tests.reports.conftest import START, Sample, changed, speeds

SINCE = datetime(2026, 11, 20, tzinfo=UTC)
PHONE = Sample("SM8750", emulator=False)


def runs(*statuses: str) -> list[RunMeans]:
    values = speeds([900.0] * 4, [50.0] * 4, [0.05] * 4, 300)
    made = []
    for number, status in enumerate(statuses):
        error = "the runner hung" if status == "failed" else None
        run = PHONE.run(
            number, "bench", values if status == "done" else {}, status=status, error=error
        )
        ended = {"finished_at": run.created_at + timedelta(minutes=30)}
        made.append(RunMeans.of(run.model_copy(update=ended)))
    return made


def health(name: str, state: str, *events: DeviceEvent) -> DeviceHealth:
    return DeviceHealth(name, (f"adb:{name}", PHONE.device.serial), state, "", SINCE, (), events)


def test_runs_of_a_device_are_summed_up() -> None:
    (use,) = find_device_use(runs("done", "failed", "done", "interrupted"), ())
    assert (use.runs, use.failed, use.interrupted) == (4, 1, 1)
    assert use.busy_s == 2 * 3600
    assert (use.first, use.last) == (START, START + timedelta(hours=3))
    assert use.last_error == "the runner hung"
    assert (use.serial, use.soc, use.health) == (PHONE.device.serial, "SM8750", None)


def test_a_device_is_known_by_any_of_its_serials_and_needs_no_runs() -> None:
    events = tuple(DeviceEvent(SINCE, "failed", f"event {number}") for number in range(60))
    granted = DeviceEvent(SINCE, "granted", "")
    known, idle = health("desk-1", "ready", granted, *events), health("desk-2", "quarantined")
    idle = DeviceHealth("desk-2", ("R2",), "quarantined", "it hung thrice", SINCE)
    first, second = find_device_use(runs("done"), (known, idle))
    assert (first.serial, first.runs, first.health) == ("desk-2", 0, idle)  # it needs somebody
    assert second.health == known
    assert [second.tally(what) for what in ("failed", "granted", "distrusted")] == [60, 1, 0]
    assert [event.text for event in second.events[:2]] == ["event 59", "event 58"]
    assert len(second.events) == MOST_EVENTS


def test_days_of_runs_failures_and_quarantines_are_one_figure() -> None:
    pool = health(
        "desk-1", "ready",
        DeviceEvent(SINCE, "failed", "no answer"), DeviceEvent(SINCE, "distrusted", "thrice"),
    )  # fmt: skip
    measured = runs("done", "done", "failed")
    (figure,) = device_figures(measured, find_device_use(measured, (pool,)))
    serial, day = PHONE.device.serial, START.replace(hour=0, minute=0)
    assert set(figure.rows) == {
        (serial, day, "done", 2.0),
        (serial, day, "without a result", 1.0),
        (serial, day, "failed in the pool", 1.0),
        (serial, day, "quarantined", 1.0),
    }
    assert device_figures((), ()) == ()


def test_heat_of_the_newest_night_stands_beside_its_speeds(tmp_path: Path) -> None:
    """Two nights of one phone; of the second, its last session starts hot and throttles."""
    charge: Condition = {"name": "charge", "outcome": "met", "before": 50, "after": 61}
    hot = {**lab.COOL, "after": 44.5}
    rates = {0: 50.0, 1: 50.0, 30: 50.0, 31: 40.0}
    with ResultsStore.open(tmp_path / "results.db") as store:
        runs = []
        for number, rate in rates.items():
            run = PHONE.run(number, "bench", speeds([900.0] * 3, [rate] * 3, [0.05] * 3, 300))
            cell = {"conditions": (lab.COOL, charge), "group_id": f"{number:032x}"}
            runs.append(changed(run, **cell))
        runs[-1] = changed(runs[-1], conditions=(hot, charge, lab.HOT))
        write_runs(store, runs[:-1])
        recorder = store.begin_run(changed(runs[-1], status="running"))
        recorder.add_telemetry(lab.samples_of(runs[-1], zones=2), repetition=0)
        recorder.finish()
    composed = page.compose(page.load(str(tmp_path / "results.db")))
    said = f"{PHONE.device.serial} throttled in 1 of 2 runs of the last day"
    assert said in composed.headline.lines
    (figure,) = (one for one in composed.figures if one.id.startswith("heat-"))
    keys = [column.key for column in figure.columns]
    cool, throttled = (dict(zip(keys, row, strict=True)) for row in figure.rows)
    assert (cool["decode_tokens_per_s"], cool["start_c"], cool["charge_percent"]) == (100, 34.9, 61)
    assert (cool["highest_c"], cool["throttled"]) == (None, None)
    assert throttled["decode_tokens_per_s"] == 80
    assert throttled["start_c"] == 44.5
    highest = throttled["highest_c"]
    assert isinstance(highest, float)
    assert 40 < highest < 50
    assert throttled["throttled"] == lab.HOT["reason"]
    lanes = figure.spec["vconcat"]
    assert isinstance(lanes, list)
    assert len(lanes) == 4, "prefill, decode, temperature, charge"

    # The report of the first night knows nothing of what came after.
    early = page.compose(page.load(str(tmp_path / "results.db"), night=START.date()))
    assert [one.run.id for one in early.results.measured] == [run.id for run in runs[:2]]
    assert not any("throttled" in line for line in early.headline.lines)
    (figure,) = (one for one in early.figures if one.id.startswith("heat-"))
    assert str(START.date()) in figure.title
    assert [row[keys.index("decode_tokens_per_s")] for row in figure.rows] == [100, 100]
    nearest = f"no night began on 2019-01-01 .*the nearest one began on {START.date()}"
    with pytest.raises(ReportError, match=nearest):
        page.load(str(tmp_path / "results.db"), night=date(2019, 1, 1))
