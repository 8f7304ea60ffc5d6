"""Time lines of runs as the pages draw them."""

import base64
import gzip
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.results.records import TelemetrySeries
from harness.results.store import ResultsStore
from harness.results.timeline import (
    Process,
    Traced,
    Traces,
    build_timeline,
    to_trace,
)
from reports import html_file, page, timeline
from reports.timeline import MOST_POINTS, timeline_figure
from tests.harness.results.test_timeline import repetition
from tests.reports import lab


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
    assert to_trace([found])


def test_a_run_without_repetitions_has_no_time_line() -> None:
    run = lab.sessions()[0].model_copy(update={"measurements": ()})
    assert timeline_figure(build_timeline(run, ())) is None


def test_telemetry_comes_out_of_the_store_with_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with ResultsStore.open(path) as store:
        lab.add_telemetry(store, lab.sessions()[:1])
    found = page.compose(page.load(str(path)))
    (shown,) = found.run_pages
    assert shown.timeline is not None
    assert (shown.trace or "").startswith("data:application/gzip;base64,")


def test_a_figure_says_whether_its_decode_steps_were_seen() -> None:
    run = lab.sessions()[0]
    calls = (
        Traced("call", "GenieDialog_create", 0.1, 0.2),
        Traced("call", "GenieDialog_query", 0.3, 1.0),
        Traced("token", "token 1", 0.3, 0.4),
        Traced("token", "token 2", 0.7, 0.1),
        Traced("token", "token 3", 0.8, 0.5),
    )
    plain, traced = (
        timeline_figure(build_timeline(run, (), traces))
        for traces in (Traces(), Traces(processes=(Process(calls),)))
    )
    assert plain is not None
    assert traced is not None
    assert "drawn evenly" in plain.about
    assert "drawn evenly" not in traced.about


def test_a_page_has_the_trace_and_names_the_kept_files(tmp_path: Path) -> None:
    run = lab.sessions()[0].model_copy(update={"status": "running", "finished_at": None})
    device = {
        "traceEvents": [
            {"cat": "function", "name": "QnnApi::graphExecute", "ts": 5, "dur": 2, "tid": 0}
        ],
        "otherData": {"began_us": 0},
    }
    with ResultsStore.open(tmp_path / "results.db") as store:
        recorder = store.begin_run(run)
        recorder.traces.append(json.dumps(device))
        recorder.add_traces([("push contents", 1.0)])
        recorder.add_artifact("dmesg.txt", b"[ 1.0] <hot>", "log")
        recorder.finish("failed", error="it crashed")
    composed = page.compose(page.load(str(tmp_path / "results.db")))
    (found,) = composed.run_pages
    assert found.trace is not None
    content = gzip.decompress(base64.b64decode(found.trace.partition("base64,")[2]))
    names = {event["name"] for event in json.loads(content)["traceEvents"]}
    assert {"QnnApi::graphExecute", "push contents"} <= names
    html = html_file.render(composed, datetime.now(UTC))
    assert "End of dmesg.txt" in html
    assert "[ 1.0] &lt;hot&gt;" in html
    assert "<b>traces.jsonl.gz</b> trace" in html
