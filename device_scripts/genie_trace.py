"""Traces of the runners beside this file: Genie's own events and each token, on one clock.

The file is in the Trace Event Format, so Perfetto reads it as it is. Times are microseconds of
``CLOCK_MONOTONIC``, the clock of the calls in Genie's profile (Python 3.8+, stdlib only).
"""

import json
import os
import time
from typing import Any, Dict, List, Sequence, Tuple

MOST_EVENTS = 40_000
"""Of more, the shortest of Genie's functions are left out."""
TOKENS, CALLS = 100, 101
"""Threads: those of Genie count from 0; two more have the tokens, and the calls of its API."""
_KEPT = frozenset({"QnnApi::graphExecute", "QnnNspModel::runInference"})

Event = Dict[str, Any]
Answer = Tuple[int, int]
"""When a callback came, in nanoseconds, and how many tokens it brought; 0: a query began."""


def process_start_us() -> int:
    """Return when this process began: a start of Python takes its time too."""
    now = time.monotonic_ns() // 1000
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(0, int(age * 1e6))


def split_profile(profile: bytes) -> Tuple[bytes, Dict[str, Any]]:
    """Return a profile as it is without a trace, and all of it, read."""
    whole: Dict[str, Any] = json.loads(profile)
    rest = {key: value for key, value in whole.items() if key != "traceEvents"}
    return json.dumps(rest).encode(), whole


def document(
    profile: Dict[str, Any], answers: Sequence[Answer] = (), calls: Sequence[Event] = ()
) -> bytes:
    """Return the trace of a process, from a profile with trace events.

    Args:
        answers: Of the dialog.
        calls: Those of the API that profiles do not list, from `call`.
    """
    calls = [*_calls(profile), *calls]
    queries = [moment // 1000 for moment, count in answers if not count]
    own, left_out = _most(_functions(profile, calls, queries))
    events = [*calls, *own, *_tokens(answers)]
    facts = {
        "clock": "CLOCK_MONOTONIC",
        "began_us": process_start_us(),
        "ended_us": time.monotonic_ns() // 1000,
        "left_out": left_out,
    }
    return json.dumps({"traceEvents": events, "otherData": facts}, separators=(",", ":")).encode()


def call(name: str, began_ns: int) -> Event:
    """Return a call of the API that ends now."""
    start = began_ns // 1000
    return _event(name, "call", start, time.monotonic_ns() // 1000 - start, CALLS, {})


def function(name: str, began_ns: int, ended_ns: int, args: Dict[str, Any]) -> Event:
    """Return work inside of a call, by ``time.monotonic_ns``."""
    start = began_ns // 1000
    return _event(name, "function", start, ended_ns // 1000 - start, 0, args)


def _calls(profile: Dict[str, Any]) -> List[Event]:
    """Return the calls of Genie's API, with their figures."""
    events = []
    for component in profile["components"]:
        for call in component["events"]:
            figures = {
                key: value["value"] for key, value in call.items() if isinstance(value, dict)
            }
            start, stop = int(call["start"]), int(call["stop"])
            events.append(_event(str(call["type"]), "call", start, stop - start, CALLS, figures))
    return events


def _functions(
    profile: Dict[str, Any], calls: Sequence[Event], queries: Sequence[int]
) -> List[Event]:
    """Return the functions inside the library, moved onto the clock of the calls."""
    events = []
    traced = profile.get("traceEvents") or ()  # null where Genie traces nothing, as of embeddings
    origin = _origin(traced, calls, queries)
    for event in traced:
        begin, lasted = int(event["ts"]), int(event["dur"])
        args = {key: value for key, value in event["args"].items() if key != "stackDepth"}
        thread = int(event["tid"])
        events.append(_event(str(event["name"]), "function", origin + begin, lasted, thread, args))
    return events


def _origin(traced: Sequence[Event], calls: Sequence[Event], queries: Sequence[int]) -> int:
    """Return where the clock of the trace begins.

    Genie does not tell. It begins inside the call that creates the dialog, about 1 ms after its
    start; the first function of the first query is known better, to within 0.3 ms.
    """
    working = [
        int(event["ts"])
        for event in traced
        if event["name"].startswith("Dialog::") and event["name"].endswith("::process")
    ]
    asking = [int(call["ts"]) for call in calls if "uery" in call["name"]] or list(queries)
    if asking and working:
        return min(asking) - min(working)
    return min((int(call["ts"]) for call in calls), default=0)


def _most(events: List[Event]) -> Tuple[List[Event], int]:
    if len(events) <= MOST_EVENTS:
        return events, 0
    by_rank = sorted(events, key=lambda event: (event["name"] not in _KEPT, -event["dur"]))
    return by_rank[:MOST_EVENTS], len(events) - MOST_EVENTS


def _tokens(answers: Sequence[Answer]) -> List[Event]:
    """Return each token from its predecessor, or its query, by the callback's clock."""
    events: List[Event] = []
    number, before = 0, answers[0][0] // 1000 if answers else 0
    for moment, count in answers:
        at = moment // 1000
        if count:
            name = f"token {number + 1}"
            if count > 1:
                name = f"tokens {number + 1} to {number + count}"
            events.append(_event(name, "token", before, at - before, TOKENS, {"tokens": count}))
        number, before = number + count, at
    return events


def _event(name: str, kind: str, ts: int, dur: int, tid: int, args: Dict[str, Any]) -> Event:
    return {
        "ph": "X", "name": name, "cat": kind, "pid": 1, "tid": tid, "ts": ts, "dur": max(0, dur),
        "args": args,
    }  # fmt: skip
