"""Time lines of runs, and their traces in the Trace Event Format."""

import gzip
import json
import math
import shutil
from collections import Counter as Count
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HostFileError
from harness.results.metrics import Measurement
from harness.results.records import RepetitionTelemetry, Run, TelemetrySeries
from harness.results.store import ResultsStore
from harness.results.timeline import (
    UNTRACED,
    Process,
    Traced,
    Traces,
    build_timeline,
    read_traces,
    to_trace,
    write_trace,
)
from tests.reports import lab

STAGES = (("hash on the host", 0.25), ("push contents", 1.25))
DEVICE_US = 36_000_000_000
EVENTS = (
    # kind, name, start and duration in microseconds since the process began, thread
    ("call", "GenieDialog_create", 100_000, 200_000, 0),
    ("call", "GenieDialog_query", 300_000, 900_000, 0),
    ("function", "QnnNspModel::runInference", 310_000, 400_000, 0),
    ("function", "QnnApi::graphExecute", 320_000, 390_001, 0),  # rounded beyond its caller
    ("function", "KVManager::unblock", 320_000, 3, 0),
    ("function", "SmartMask::updateKV", 700_000, 5, 2),
    ("token", "token 1", 300_000, 410_000, 100),
    ("token", "token 2", 710_000, 240_000, 100),
    ("token", "token 3", 950_000, 250_000, 100),
)


def device_trace(**facts: object) -> str:
    """A trace as a runner writes it."""
    events = [
        {
            "ph": "X", "cat": kind, "name": name, "ts": DEVICE_US + start, "dur": seconds,
            "pid": 1, "tid": thread, "args": {"tokens": 1},
        }
        for kind, name, start, seconds, thread in EVENTS
    ]  # fmt: skip
    return json.dumps({"traceEvents": events, "otherData": {"began_us": DEVICE_US, **facts}})


def with_push(run: Run) -> Run:
    push = Measurement(metric="push_s", value=1.5)
    return run.model_copy(update={"measurements": (*run.measurements, push)})


def repetition(*series: TelemetrySeries, number: int = 0) -> RepetitionTelemetry:
    return RepetitionTelemetry(number, is_warmup=False, series=series)


def check_format(content: bytes) -> list[dict[str, Any]]:
    """Check what the importers of Chrome and Perfetto ask of a trace; return its events."""
    document = json.loads(content)
    open_slices: dict[tuple[int, int], list[int]] = {}
    events: list[dict[str, Any]] = document["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "C"}
    slices = [event for event in events if event["ph"] == "X"]
    for event in slices:
        assert event["ts"] >= 0 <= event["dur"]
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
    for event in sorted(slices, key=lambda e: (round(e["ts"] * 10), -e["dur"])):
        start, length = round(event["ts"] * 10), round(event["dur"] * 10)
        around = open_slices.setdefault((event["pid"], event["tid"]), [])
        while around and around[-1] <= start:
            around.pop()
        assert not around or start + length <= around[-1], f"{event} does not lie in its caller"
        around.append(start + length)
    for event in events:
        if event["ph"] == "C":
            assert isinstance(event["args"]["value"], float)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named >= set(open_slices)
    return events


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


def stored(path: Path, *lines: str) -> tuple[ResultsStore, Run]:
    """A store with a run that has a trace of one deployment and some processes."""
    store = ResultsStore.open(path / "results.db")
    run = lab.sessions()[0].model_copy(update={"status": "running", "finished_at": None})
    with store.recording(run) as recorder:
        recorder.traces.extend(lines)
        recorder.add_traces(STAGES)
    return store, store.get_run(run.id)


def test_a_traced_repetition_has_its_real_phases_and_tokens(tmp_path: Path) -> None:
    store, run = stored(tmp_path, device_trace(), device_trace(left_out=7))
    with store:
        traces = read_traces(store, store.artifacts(run.id))
    assert traces.stages == STAGES
    assert [len(process.events) for process in traces.processes] == [len(EVENTS)] * 2
    found = build_timeline(with_push(run), (), traces)
    assert found.left_out == 7
    push, gap, load, prefill, decode = found.spans[:5]
    assert (push.seconds, push.part) == (1.5, "deployment")
    assert [one.name for one in (gap, load, prefill, decode)] == [
        "other",
        "load",
        "prefill",
        "decode",
    ]
    began = gap.start_s
    assert load.start_s - began == pytest.approx(0.1)
    assert (prefill.start_s - began, prefill.seconds) == pytest.approx((0.3, 0.41))
    assert (decode.start_s - began, decode.seconds) == pytest.approx((0.71, 0.49))
    assert decode.steps == 2
    assert {span.name for span in found.spans[9:]} == {"load", "prefill", "decode"}  # not traced

    events = check_format(to_trace([found]))
    count = Count(event["name"] for event in events if event["ph"] == "X")
    assert count["QnnApi::graphExecute"] == count["token 2"] == 2
    assert count["push contents"] == 1
    (query, _) = (event for event in events if event["name"] == "GenieDialog_query")
    assert query["ts"] == pytest.approx((began + 0.3) * 1e6, abs=0.2)


def test_runs_stand_beside_each_other_as_they_began() -> None:
    first = lab.sessions()[0]
    second = first.model_copy(update={"created_at": first.created_at + timedelta(seconds=90)})
    events = check_format(to_trace([build_timeline(run, ()) for run in (second, first)]))
    loads = [(event["pid"], event["ts"]) for event in events if event["name"] == "load"]
    starts = {pid: min(ts for one, ts in loads if one == pid) for pid in (1, 2)}
    assert starts[1] - starts[2] == pytest.approx(90e6, abs=1)


def test_the_shortest_functions_are_left_out_of_a_bounded_trace(tmp_path: Path) -> None:
    store, run = stored(tmp_path, device_trace())
    with store:
        line = build_timeline(run, (), read_traces(store, store.artifacts(run.id)))
    document = json.loads(to_trace([line], len(line.traced) - 2))
    assert document["otherData"]["events left out"] == 2
    names = {event["name"] for event in document["traceEvents"]}
    assert "QnnApi::graphExecute" in names
    assert not {"KVManager::unblock", "SmartMask::updateKV"} & names


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        "{}",
        '{"otherData": {"began_us": 1}, "traceEvents": 3}',
        '{"otherData": {"began_us": "x"}, "traceEvents": []}',
        '{"stages": [["push", -1], ["hash"]]}',
        json.dumps({"otherData": {"began_us": 1e400}, "traceEvents": [{"ts": 1}]}),
    ],
)
def test_a_strange_trace_is_no_obstacle(tmp_path: Path, line: str) -> None:
    store, run = stored(tmp_path, line, device_trace())
    with store:
        found = build_timeline(run, (), read_traces(store, store.artifacts(run.id)))
    assert "QnnApi::graphExecute" in {event.name for event in found.traced}
    check_format(to_trace([found]))


numbers = st.floats() | st.integers() | st.text(max_size=3) | st.none()


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "ts": numbers,
                "dur": numbers,
                "tid": numbers,
                "cat": st.sampled_from(["call", "function", "token", "x"]),
                "name": st.text(max_size=20) | st.none(),
            },
            optional={"args": st.dictionaries(st.text(max_size=3), numbers) | st.text()},
        )
    )
)
def test_whatever_a_device_writes_becomes_a_legal_trace(events: list[dict[str, object]]) -> None:
    from harness.results.timeline import _parse

    line = json.dumps({"traceEvents": events, "otherData": {"began_us": 0}}).encode()
    found = build_timeline(lab.sessions()[0], (), _parse([line]))
    document = json.loads(to_trace([found]), parse_constant=lambda _: pytest.fail("no JSON"))
    assert all(
        math.isfinite(event["ts"]) for event in document["traceEvents"] if event["ph"] == "X"
    )


def test_no_trace_or_a_lost_one_is_none(tmp_path: Path) -> None:
    store, run = stored(tmp_path, device_trace())
    with store:
        (artifact,) = store.artifacts(run.id)
        shutil.rmtree(tmp_path / "results.db.artifacts")
        assert artifact.kind == "trace"
        assert read_traces(store, store.artifacts(run.id)) == UNTRACED


def test_a_trace_is_written_plain_or_packed(tmp_path: Path) -> None:
    store, run = stored(tmp_path, device_trace())
    with store:
        write_trace(store, [run], tmp_path / "t.json")
        write_trace(store, [run], tmp_path / "t.json.gz")
        with pytest.raises(HostFileError, match="no-folder"):
            write_trace(store, [run], tmp_path / "t.json" / "no-folder")
    plain = (tmp_path / "t.json").read_bytes()
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == plain
    assert "QnnApi::graphExecute" in {event["name"] for event in check_format(plain)}


def trace_of(run: Run) -> bytes:
    calls = tuple(
        Traced(kind, name, start / 1e6, seconds / 1e6, thread)
        for kind, name, start, seconds, thread in EVENTS
    )
    traces = Traces(STAGES, (Process(calls),))
    return to_trace([build_timeline(with_push(run), [repetition(*lab.samples_of(run))], traces)])


def test_a_trace_is_in_the_trace_event_format() -> None:
    run = lab.sessions()[0]
    events = check_format(to_trace([build_timeline(run, [repetition(*lab.samples_of(run))])]))
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 3]
    assert len(steps) == 4 * 15
    assert all("evenly" in step["args"]["time"] for step in steps)


def test_the_events_are_those_of_perfettos_schema() -> None:
    """Each slice is a `ChromeTraceEvent` of the messages that the package `perfetto` carries."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

    for event in check_format(trace_of(lab.sessions()[0])):
        message = schema.ChromeTraceEvent(
            name=event["name"],
            phase=ord(event["ph"]),
            timestamp=round(event.get("ts", 0)),
            duration=round(event.get("dur", 0)),
            process_id=event["pid"],
            thread_id=event.get("tid", 0),
            category_group_name=event.get("cat", ""),
        )
        for key, value in event["args"].items():
            kind = "string_value" if isinstance(value, str) else "double_value"
            message.args.add(name=key, **{kind: value})
        assert message.IsInitialized()
        assert schema.ChromeTraceEvent.FromString(message.SerializeToString()) == message
