"""Runs for as long as asked, and watches: the same answers, no growing memory, no falling speed."""

import itertools
import statistics
import time

import pytest

from harness.pytest_plugin.measurements import MeasurementRecorder
from harness.telemetry.throttling import judge_throttling
from harness.workloads.bench_prompt import cut_prompt
from harness.workloads.session import Session
from suites.answers import ask, hold, limit_of
from suites.parameters import SuiteParameters

_NEW_TOKENS, _ON_EMULATOR = 16, 4
_PROMPT_TOKENS = 32
_FEWEST = 3
MEMORY = "peak_anonymous_bytes"
"""Memory that may not grow: pages of mapped files come and go with the page cache."""


def test_speed_holds(
    session: Session,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
) -> None:
    """The same query until the time is over: one answer, no clock that falls, no slowing down."""
    new_tokens = _ON_EMULATOR if session.properties.emulator else _NEW_TOKENS
    limit = limit_of(session)
    room = min(limit.longest_prompt, limit.context_length - new_tokens)
    prompt = cut_prompt(session.model.tokenizer, min(_PROMPT_TOKENS, room) - 1)
    texts, rates, memory, throttled = set[str](), list[float](), list[float](), list[str]()
    end = time.monotonic() + suite_parameters.soak_s
    for number in itertools.count():
        if number >= _FEWEST and time.monotonic() >= end:
            break
        result = ask(session, tokens=prompt.token_ids, max_tokens=new_tokens)
        texts.add(result.text)
        rates.append(result.metrics["prefill_tokens_per_s"])
        if MEMORY in result.metrics:  # on a very busy device there may be none
            memory.append(result.metrics[MEMORY])
            record_measurement(MEMORY, memory[-1])
        throttling = judge_throttling(result.telemetry)
        throttled += throttling.reasons if throttling.throttled else ()
        record_measurement("prefill_tokens_per_s", rates[-1])
    record_measurement.show("soak", "prefill_tokens_per_s", tuple(rates))
    assert len(texts) == 1, f"one query, several answers: {sorted(texts)}"
    if memory:
        _assert_holds(memory, suite_parameters.max_memory_growth, "memory of a query")
    if throttled:
        pytest.fail(f"the device throttled: {'; '.join(throttled[:4])}", pytrace=False)
    if not session.properties.emulator:  # the emulator's speed is the host's, which has other work
        _assert_holds(
            [1 / rate for rate in rates], suite_parameters.max_slowdown, "time for a token"
        )


def test_memory_of_one_process_holds(session: Session, suite_parameters: SuiteParameters) -> None:
    """A process that held many dialogs is no larger than one that held few."""
    turn = ("In the beginning",)
    new_tokens = _ON_EMULATOR if session.properties.emulator else _NEW_TOKENS
    few = hold(session, [turn] * 2, new_tokens)
    many_count = 2 + suite_parameters.soak_dialogs
    many = hold(session, [turn] * many_count, new_tokens)
    assert set(many.answers) == set(few.answers)
    if MEMORY not in few.metrics or MEMORY not in many.metrics:
        pytest.skip("the device was too busy to look at the memory of its processes")
    growth = many.metrics[MEMORY] / few.metrics[MEMORY] - 1
    assert growth <= suite_parameters.max_memory_growth, (
        f"{many_count} dialogs took {many.metrics[MEMORY]:,.0f} bytes, 2 took "
        f"{few.metrics[MEMORY]:,.0f}: {growth:+.1%}"
    )


def _assert_holds(values: list[float], limit: float, what: str) -> None:
    """The median of the last third is not over that of the first by more than `limit`."""
    third = max(len(values) // 3, 1)
    before, after = statistics.median(values[:third]), statistics.median(values[-third:])
    assert after <= before * (1 + limit), (
        f"{what} went from {before:,.6g} to {after:,.6g} in {len(values)} queries"
    )
