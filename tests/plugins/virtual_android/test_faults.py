"""Faults as text."""

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import VirtualDeviceError
from plugins.virtual_android.faults import (
    ALWAYS,
    DSP_MESSAGES,
    KINDS,
    Babble,
    Corrupt,
    Drop,
    Dsp,
    InjectedFault,
    Power,
    Runner,
    Slow,
    Stall,
    When,
    parse_fault,
)


def _values(kind: type[InjectedFault], name: str, default: object) -> st.SearchStrategy[object]:
    low, high = kind.bounds.get(name, (0, 10**6))
    match name:
        case "when":
            return st.sampled_from(typing.get_args(When))
        case "cause":
            return st.sampled_from(list(DSP_MESSAGES))
        case "signal":
            return st.sampled_from(["KILL", "STOP"])
        case "match":
            return st.from_regex(r"[a-z_.]{1,20}", fullmatch=True)
    if isinstance(default, float):
        return st.floats(low, high)
    return st.integers(int(low), int(min(high, 10**6)))


@st.composite
def _faults(draw: st.DrawFn) -> InjectedFault:
    kind = draw(st.sampled_from(list(KINDS.values())))
    given = {}
    for field in dataclasses.fields(kind):
        if draw(st.booleans()):
            given[field.name] = draw(_values(kind, field.name, field.default))
    return kind(**given)  # type: ignore[arg-type]


@given(_faults())
def test_texts_of_faults_round_trip(fault: InjectedFault) -> None:
    assert parse_fault(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("corrupt:count=always", "corrupt:count=always"),
        ("drop:count=0", "drop:count=always"),
        ("full:count=always", "full"),
        ("stall:seconds=0.10,bytes=007", "stall:seconds=0.1,bytes=7"),
        ("power:after=0.0000000001", "power:after=1e-10"),
        ("slow:rate=10000000000000.0", "slow:rate=10000000000000"),
    ],
)
def test_a_fault_is_listed_in_canonical_form(text: str, listed: str) -> None:
    assert str(parse_fault(text)) == listed


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("drop:bytes=100000", Drop(bytes=100000)),
        ("stall:seconds=5", Stall(seconds=5)),
        ("stall", Stall()),
        ("corrupt:file=2", Corrupt(file=2)),
        ("power:after=0.5,off=inf", Power(after=0.5, off=float("inf"))),
        ("runner:signal=STOP,after=0.3", Runner(signal="STOP", after=0.3)),
        ("dsp:cause=skeleton", Dsp(cause="skeleton")),
        ("slow:ms=50,rate=1000", Slow(ms=50, rate=1000)),
        ("babble:bytes=inf,match=ls", Babble(bytes=float("inf"), match="ls")),
        ("drop:count=always,when=push,seed=7", Drop(count=ALWAYS, when="push", seed=7)),
    ],
)
def test_texts_of_the_documentation(text: str, fault: InjectedFault) -> None:
    assert parse_fault(text) == fault


@given(st.text(max_size=60) | st.from_regex(r"(drop|stall|slow):[a-z=,.0-9-]{0,30}"))
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    try:
        fault = parse_fault(text)
    except VirtualDeviceError as error:
        message = str(error)
    else:
        message = str(fault)
    assert message.isprintable()


@pytest.mark.parametrize(
    "text",
    ["", "melt", "drop:", "drop:bytes", "drop:bytes=-1", "drop:bytes=1,bytes=2", "drop:when=never",
     "stall:seconds=nan", "corrupt:file=0", "throttle:factor=0.5", "throttle:count=1",
     "runner:signal=TERM", "dsp:cause=weather", "runner:match=a b", "slow:rate=0",
     f"runner:match={'x' * 500}"],
)  # fmt: skip
def test_values_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(VirtualDeviceError):
        parse_fault(text)
