import json
from typing import Any

import pytest

from device_scripts import genie_trace

START = 36_104_917_952


def profile(**query: object) -> dict[str, Any]:
    """A profile with trace events, as Genie 1.21 writes it."""
    events = [{"type": "GenieDialog_create", "start": START, "stop": START + 123_319}]
    asked = {"type": "GenieDialog_query", "start": START + 123_693, "stop": START + 962_233}
    functions = [
        ("QnnApi::createDevice", 81_248, 2_435, 0, 4),
        ("Dialog::Basic::process", 122_598, 838_298, 0, 0),
        ("QnnApi::graphExecute", 496_382, 40_295, 0, 1),
        ("SmartMask::updateKV", 352_993, 3, 1, 0),
    ]
    return {
        "components": [{"type": "dialog", "events": [*events, {**asked, **query}]}],
        "traceEvents": [
            {"name": name, "ph": "X", "cat": "function", "ts": ts, "dur": dur, "pid": 0,
             "tid": tid, "args": {"stackDepth": depth}}
            for name, ts, dur, tid, depth in functions
        ],
    }  # fmt: skip


def events_of(content: bytes) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in json.loads(content)["traceEvents"]}


def test_functions_are_moved_onto_the_clock_of_the_calls() -> None:
    figures = {"num-prompt-tokens": {"value": 11, "unit": ""}}
    found = events_of(genie_trace.document(profile(**figures)))
    query, process = found["GenieDialog_query"], found["Dialog::Basic::process"]
    assert query["ts"] == process["ts"] == START + 123_693
    assert process["ts"] + process["dur"] <= query["ts"] + query["dur"]
    assert query["args"] == {"num-prompt-tokens": 11}
    created, device = found["GenieDialog_create"], found["QnnApi::createDevice"]
    assert created["ts"] < device["ts"] < created["ts"] + created["dur"]
    assert found["SmartMask::updateKV"]["tid"] == 1
    assert "stackDepth" not in process["args"]


def test_a_token_lasts_from_the_one_before_it() -> None:
    began = (START + 123_700) * 1000
    answers = [(began, 0), (began + 200_000_000, 1), (began + 300_000_000, 3)]
    found = events_of(genie_trace.document(profile(), answers))
    assert (found["token 1"]["ts"], found["token 1"]["dur"]) == (began // 1000, 200_000)
    assert (found["tokens 2 to 4"]["dur"], found["tokens 2 to 4"]["args"]) == (
        100_000,
        {"tokens": 3},
    )


def test_a_query_that_filled_the_context_is_placed_by_our_own_clock() -> None:
    content = profile()
    del content["components"][0]["events"][1]  # Genie lists it not
    found = events_of(genie_trace.document(content, [((START + 123_700) * 1000, 0)]))
    assert found["Dialog::Basic::process"]["ts"] == START + 123_700


def test_of_many_functions_the_shortest_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(genie_trace, "MOST_EVENTS", 2)
    content = genie_trace.document(profile())
    assert json.loads(content)["otherData"]["left_out"] == 2
    assert "QnnApi::graphExecute" in events_of(content)  # though it is shorter than others
    assert "SmartMask::updateKV" not in events_of(content)


def test_the_profile_is_the_same_without_its_trace() -> None:
    whole = profile()
    rest, read = genie_trace.split_profile(json.dumps(whole).encode())
    assert read == whole
    assert json.loads(rest) == {"components": whole["components"]}
