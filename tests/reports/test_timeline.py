"""Time lines of runs, their charts, their traces, and energy."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from harness.results.records import Measurement, RepetitionTelemetry, Run, TelemetrySeries
from harness.results.store import ResultsStore
from reports import page, timeline
from reports.timeline import (
    MOST_POINTS,
    build_timeline,
    energy_per_token,
    timeline_figure,
    to_trace,
)
from tests.reports import lab

TIMES = tuple(n / 10 for n in range(40))


def with_push(run: Run) -> Run:
    push = Measurement(metric="push_s", value=1.5)
    return run.model_copy(update={"measurements": (*run.measurements, push)})


def repetition(*series: TelemetrySeries, number: int = 0) -> RepetitionTelemetry:
    return RepetitionTelemetry(number, is_warmup=False, series=series)


def test_phases_follow_each_other_as_genie_measured_them() -> None:
    run = with_push(lab.sessions()[0])
    found = build_timeline(run, ())
    assert [span.name for span in found.spans] == ["push", *["load", "prefill", "decode"] * 4]
    assert [span.part for span in found.spans[1::3]] == [
        "warm-up 1",
        "repetition 1",
        "repetition 2",
        "repetition 3",
    ]
    load, prefill, decode = found.spans[4:7]
    assert load.seconds == run.values("init_s")[0]
    assert prefill.seconds == run.values("ttft_s")[0]
    assert prefill.start_s == pytest.approx(load.start_s + load.seconds)
    assert (decode.steps, decode.seconds) == (15, 15 / run.values("decode_tokens_per_s")[0])
    starts = [span.start_s for span in found.spans]
    assert starts == sorted(starts)
    assert found.seconds == pytest.approx(found.spans[-1].start_s + found.spans[-1].seconds)


def test_samples_stand_where_their_repetition_does() -> None:
    run = lab.sessions()[0]
    heat = TelemetrySeries("temp_c:skin", "degC", (-0.5, 0.0, 1.0), (30.0, 31.0, 32.0))
    found = build_timeline(run, [repetition(heat), repetition(heat, number=1)])
    (counter,) = found.counters
    first, second = (found.spans[index].start_s for index in (3, 6))
    known = [(t, v) for t, v in counter.points if v is not None]
    assert [known[1][0], known[4][0]] == pytest.approx([first, second])
    assert known[1][1] == known[4][1] == 31.0
    assert [t for t, _ in counter.points] == sorted(t for t, _ in counter.points)
    assert any(v is None for _, v in counter.points)  # no line joins two repetitions


def test_many_samples_are_thinned_and_keep_extremes_and_gaps() -> None:
    values: list[float | None] = [40.0] * 20_000
    values[12_345], values[3_000] = 99.0, None
    times = tuple(n / 10 for n in range(20_000))
    run = lab.sessions()[0]
    found = build_timeline(
        run, [repetition(TelemetrySeries("temp_c:skin", "degC", times, tuple(values)))]
    )
    figure = timeline_figure(found)
    assert figure is not None
    assert figure.samples is not None
    shown = [row[5] for row in figure.samples.rows if row[1] == "temp_c:skin"]
    assert len(shown) <= 2 * MOST_POINTS
    assert 99.0 in shown
    assert None in shown
    (row,) = [row for row in figure.rows if row[0] == "temp_c:skin"]
    assert row[1:5] == pytest.approx((19_999.0, 40.0, 40.003, 99.0), abs=1e-3)


def test_the_channels_that_tell_most_are_shown_and_the_others_counted() -> None:
    run = lab.sessions()[0]
    figure = timeline_figure(build_timeline(run, [repetition(*lab.samples_of(run))]))
    assert figure is not None
    assert "3 of temperature" in figure.about
    names = [row[0] for row in figure.rows]
    assert {"load", "prefill", "decode", "cpu_hz:7", "rss_bytes", "battery_w"} <= set(names)
    assert sum(str(name).startswith("temp_c") for name in names) == timeline.MOST_LINES


@pytest.mark.parametrize(
    "series",
    [
        TelemetrySeries("temp_c:a", "degC", (), ()),
        TelemetrySeries("temp_c:a", "degC", (0.0, 1.0), (None, None)),
        TelemetrySeries("temp_c:a", "degC", (1.0,), (40.0,)),
        TelemetrySeries("unknown", "x", (0.0, 1.0), (1.0, 2.0)),
    ],
)
def test_odd_series_are_no_obstacle(series: TelemetrySeries) -> None:
    found = build_timeline(lab.sessions()[0], [repetition(series)])
    figure = timeline_figure(found)
    assert figure is not None
    assert figure.samples is not None
    assert figure.samples.to_csv().startswith("panel,name,part,start_s,end_s,value,steps\nphase,")
    assert to_trace(found)


def test_a_run_without_repetitions_has_no_time_line() -> None:
    run = lab.sessions()[0].model_copy(update={"measurements": ()})
    assert timeline_figure(build_timeline(run, ())) is None


def test_energy_is_that_of_measured_repetitions_per_token() -> None:
    run = lab.sessions()[0]
    current = TelemetrySeries("battery_a", "A", TIMES, (-0.5,) * len(TIMES))
    voltage = TelemetrySeries("battery_v", "V", TIMES, (4.0,) * len(TIMES))
    warmup = RepetitionTelemetry(0, is_warmup=True, series=(current, voltage))
    found = energy_per_token(run, [warmup, repetition(current, voltage)])
    assert found == pytest.approx(2.0 * 3.9 / 16)
    assert energy_per_token(run, [repetition(current)]) is None


def trace_of(run: Run) -> bytes:
    return to_trace(build_timeline(with_push(run), [repetition(*lab.samples_of(run))]))


def test_a_trace_is_in_the_trace_event_format() -> None:
    document = json.loads(gzip.decompress(trace_of(lab.sessions()[0])))
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    assert all(isinstance(e["args"]["value"], float) for e in events if e["ph"] == "C")
    steps = [e for e in events if e["ph"] == "X" and e["tid"] == 3]
    assert len(steps) == 4 * 15
    assert all("evenly" in step["args"]["time"] for step in steps)


def test_the_trace_processor_reads_a_trace(tmp_path: Path) -> None:
    """The package `perfetto` is a client; it loads the processor itself from Perfetto's server."""
    binary = os.environ.get("QNNFARM_TRACE_PROCESSOR") or shutil.which("trace_processor_shell")
    if binary is None:
        pytest.skip("no trace_processor_shell: name one with QNNFARM_TRACE_PROCESSOR")
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    path = tmp_path / "trace.json.gz"
    path.write_bytes(trace_of(lab.sessions()[0]))
    with TraceProcessor(str(path), config=TraceProcessorConfig(bin_path=binary)) as processor:
        names = {row.name for row in processor.query("SELECT DISTINCT name FROM slice")}
        assert {"push", "load", "prefill", "decode"} <= names
        (row,) = processor.query("SELECT COUNT(*) AS n FROM counter")
        assert row.n > 1000


def test_telemetry_comes_out_of_the_store_with_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with ResultsStore.open(path) as store:
        lab.add_telemetry(store, lab.sessions())
    found = page.compose(page.load(str(path)))
    assert [one.timeline is not None for one in found.run_pages] == [True] * 4
    assert all(
        (one.trace or "").startswith("data:application/gzip;base64,") for one in found.run_pages
    )
    (section,) = found.sections
    assert section.energy_of(section.rows[0]) is not None
