"""Telemetry goes into few bytes and comes out as it was; what is damaged is refused."""

import base64
import math
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import CorruptRunError, NotStoredError, RunConflictError, TelemetryRecordError
from harness.results import telemetry
from harness.results.records import TelemetrySeries
from harness.results.run_recorder import RunRecorder
from harness.results.store import ResultsStore
from harness.results.telemetry import pack, unpack
from tests.harness.results.places import Place, make_run


def at_10_hz(seconds: int, channels: int) -> list[TelemetrySeries]:
    """What a phone gives: clocks in steps, temperatures that creep, currents that move."""
    source = random.Random(4)  # noqa: S311
    times = tuple(0.1 * n + source.uniform(0, 0.004) for n in range(10 * seconds))
    made = []
    for number in range(channels):
        if number % 3 == 0:
            name, unit = f"cpu_hz:{number}", "Hz"
            values = [source.choice((384e6, 1.2e9, 2.4e9, 3.3e9)) for _ in times]
        elif number % 3 == 1:
            name, unit = f"temp_c:zone{number}", "degC"
            values = [round(35 + n / 50 + source.gauss(0, 0.2), 1) for n, _ in enumerate(times)]
        else:
            name, unit = f"battery_a:{number}", "A"
            values = [round(source.gauss(-0.8, 0.1), 6) for _ in times]
        made.append(TelemetrySeries(name, unit, times, tuple(values)))
    return made


moments = st.lists(st.integers(-(10**9), 10**12).map(lambda us: us / 1e6), max_size=20).map(sorted)
numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def some_series(draw: st.DrawFn) -> list[TelemetrySeries]:
    names = draw(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1), unique=True))
    shared = draw(moments)
    made = []
    for name in names[:6]:
        times = shared if draw(st.booleans()) else draw(moments)
        values = draw(st.lists(numbers, min_size=len(times), max_size=len(times)))
        made.append(TelemetrySeries(name[:100], "x", tuple(times), tuple(values)))
    return made


@given(some_series())
def test_series_come_back_to_the_microsecond(series: list[TelemetrySeries]) -> None:
    assert unpack(pack(series)) == tuple(series)


def test_what_the_first_version_stored_is_read_and_written_alike() -> None:
    """Written by qnnfarm 0.1.0 before its packing was done by numpy."""
    stored = base64.b64decode(
        "eNqrVipTsjLUUUrOzynNzStWsoo21jGM1VEqTi3KTAVxo5VKUnML4pOtkgtKlXSUUlLTnZV0DHSMYnWilZISS0pS"
        "iyrjE4ESjiBRXUOQcFFxcXxSZQlQu44SlDbUMYiNreV6cGBBnHrbD07G/wwMyAgGtjFo8jLwMaCBBgaGUAx09UeD"
        "fT0DgwBYBQA/eDFG"
    )
    times = (-0.5, 0.1, 0.2)
    series = (
        TelemetrySeries("temp_c:cpu", "degC", times, (35.1, None, 36.25)),
        TelemetrySeries("battery_a", "A", times, (-0.0, 1 / 3, None)),
        TelemetrySeries("rss_bytes", "bytes", (0.0,), (1048576.0,)),
    )
    assert unpack(stored) == series
    assert zlib.decompress(pack(series)) == zlib.decompress(stored)


def test_a_minute_at_10_hz_of_30_channels_stays_small() -> None:
    series = at_10_hz(60, 30)
    size = len(pack(series))
    assert unpack(pack(series))[4].values == series[4].values
    assert size < 40_000  # 18,000 samples, which are 144,000 bytes as bare floats, without times


def test_telemetry_of_repetitions_is_kept_apart(store: ResultsStore) -> None:
    run = make_run()
    warm, first = at_10_hz(1, 2), at_10_hz(1, 3)
    with store.recording(run) as recorder:
        recorder.add_telemetry(warm, repetition=0, is_warmup=True)
        recorder.add_telemetry(first, repetition=0)
        recorder.add_telemetry([], repetition=1)
        with pytest.raises(RunConflictError, match="exists already"):
            recorder.add_telemetry(first, repetition=0)
    kept = store.telemetry(run.id)
    assert [(one.repetition, one.is_warmup, len(one.series)) for one in kept] == [
        (0, True, 2),
        (0, False, 3),
    ]
    with pytest.raises(RunConflictError, match="done already"):
        RunRecorder(store.database, run).add_telemetry(first, repetition=1)
    with pytest.raises(NotStoredError):
        store.telemetry("0" * 32)


@pytest.mark.parametrize(
    ("channel", "t_s", "values", "says"),
    [
        ("", (0.0,), (1.0,), "no name"),
        ("a\nb", (0.0,), (1.0,), "name"),
        ("a" * 500, (0.0,), (1.0,), "name"),
        ("a", (0.0, 1.0), (1.0,), "2 times for 1 values"),
        ("a", (1.0, 0.0), (1.0, 1.0), "backwards"),
        ("a", (0.0,), (math.nan,), "finite"),
        ("a", (math.inf,), (1.0,), "within a run"),
        ("a", (1e300,), (1.0,), "within a run"),
    ],
)
def test_a_series_that_cannot_be_one_is_refused(
    channel: str, t_s: tuple[float, ...], values: tuple[float, ...], says: str
) -> None:
    with pytest.raises(TelemetryRecordError, match=says):
        TelemetrySeries(channel, "x", t_s, values)


def test_a_channel_is_there_once() -> None:
    one = TelemetrySeries("a", "x", (0.0,), (1.0,))
    with pytest.raises(TelemetryRecordError, match="twice"):
        pack([one, one])


def head(text: str, body: bytes = b"") -> bytes:
    return zlib.compress(text.encode() + b"\n" + body)


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"x" * 40,
        zlib.compress(b""),
        head("[]"),
        head("[" * 100_000),
        head('{"v":2,"columns":[],"series":[]}'),
        head('{"v":1,"columns":[1],"series":[]}'),
        head('{"v":1,"columns":[-1],"series":[]}'),
        head('{"v":1,"columns":[99999999999],"series":[]}'),
        head('{"v":1,"columns":[0],"series":[["a","x",1,0]]}'),
        head('{"v":1,"columns":[0],"series":[["a","x",true,0]]}', b"x"),
        head('{"v":1,"columns":[0],"series":[["a","x",0.0,0]]}'),
        head('{"v":1,"columns":[0],"series":[["a","x",0,0.0]]}'),
        head('{"v":1,"columns":[0],"series":[[1,"x",0,0]]}'),
        head('{"v":1,"columns":[0],"series":[["a","x",0,7]]}'),
        head('{"v":1,"columns":[0],"series":[["a","x",0]]}'),
        head('{"v":1,"columns":[0],"series":[["\\u0000","x",0,0]]}'),
        head('{"v":1,"columns":[1],"series":[["a","x",0,0]]}', b"\xff" * 7 + b"\x7f" * 9),
        head('{"v":1,"columns":[1],"series":[["a","x",0,-1]]}', b"\0" * 14 + b"\xf0\x7f"),
        pack([TelemetrySeries("a", "x", (0.0,), (1.0,))])[:-2],
        pack([TelemetrySeries("a", "x", (0.0,), (1.0,))]) + b"more",
    ],
)
def test_damaged_values_are_refused(stored: bytes) -> None:
    with pytest.raises(TelemetryRecordError):
        unpack(stored)


def test_too_many_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = pack(at_10_hz(1, 2))
    monkeypatch.setattr(telemetry, "_LARGEST", len(zlib.decompress(stored)) - 1)
    with pytest.raises(TelemetryRecordError, match="too long"):
        unpack(stored)


@given(st.binary(max_size=60), st.integers(0, 200))
def test_whatever_is_changed_is_read_or_refused(junk: bytes, at: int) -> None:
    plain = bytearray(zlib.decompress(pack(at_10_hz(1, 2))))
    plain[at : at + len(junk)] = junk
    try:
        unpack(zlib.compress(bytes(plain)))
    except TelemetryRecordError as error:
        refusals = [str(error)]
    else:
        refusals = []
    assert all(text.isprintable() for text in refusals)


def test_the_largest_telemetry_can_be_kept(store: ResultsStore) -> None:
    """What does not compress; a megabyte or two, where phones give some ten thousand bytes."""
    source = random.Random(7)  # noqa: S311
    times = tuple(n / 1000 for n in range(150_000))
    noise = TelemetrySeries("noise", "x", times, tuple(source.random() for _ in times))
    run = make_run()
    with store.recording(run) as recorder:
        recorder.add_telemetry([noise], repetition=0)
    (kept,) = store.telemetry(run.id)
    assert kept.series == (noise,)
    assert store.newest_with_telemetry(3) == store.newest_with_telemetry(3, {run.id}) == {run.id}
    assert store.newest_with_telemetry(3, {"another"}) == frozenset()


_TAMPERED = {"sqlite": ("'text'", "x'00'", "7"), "postgresql": ("''", "'\\x00'", "'text'")}


@pytest.mark.parametrize("number", range(3))
def test_a_tampered_value_is_a_damaged_run(store: ResultsStore, place: Place, number: int) -> None:
    run = make_run()
    with store.recording(run) as recorder:
        recorder.add_telemetry(at_10_hz(1, 1), repetition=0)
    place.run(f"UPDATE telemetry SET samples = {_TAMPERED[place.engine][number]}")  # noqa: S608
    with pytest.raises(CorruptRunError, match="damaged"):
        store.telemetry(run.id)
