"""What a device writes is taken strictly, and never taken for something else."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.results.derived import DISCHARGING
from harness.telemetry.protocol import MOST_CHANNELS, parse_recording, parse_value, unit_of

HEAD = """\
format=1
period_cs=10
wait=read
page_bytes=16384
tick_hz=100
channel 0 kHz cpu_hz:0
channel 1 pages rss_bytes
channel 2 mC temp_c:cpu-0-0
channel 3 mC temp_c:skin
channel 4 kB rss_peak_bytes
"""
END = "qnnfarm-telemetry end=exited samples=2 cpu_ticks=1 elapsed_cs=250\n"


def test_samples_become_series_in_units_people_use() -> None:
    text = HEAD + "s 2 0 1804800 100 / 2 41500 33000 / 4 2048\ns 12 0 - 200 / 2 42000 -\n" + END
    recording = parse_recording(text)
    series = {one.channel: one for one in recording.series}
    assert series["cpu_hz:0"].values == (1804.8e6, None)
    assert series["cpu_hz:0"].t_s == (0.02, 0.12)
    assert series["cpu_hz:0"].unit == "Hz"
    assert series["rss_bytes"].values == (100 * 16384.0, 200 * 16384.0)
    assert series["temp_c:cpu-0-0"].values == (41.5, 42.0)
    assert series["temp_c:skin"].values == (33.0, None)
    assert series["rss_peak_bytes"].values == (2048 * 1024.0,)
    assert (recording.end, recording.forks, recording.dropped) == ("exited", False, 0)
    assert recording.cpu_share == pytest.approx(0.004)


def test_a_recording_that_was_cut_short_keeps_what_it_has() -> None:
    recording = parse_recording(HEAD + "s 2 0 1804800 100\ns 12 0 18048")
    assert recording.end == ""
    assert [len(one.values) for one in recording.series] == [2, 1]


def test_the_battery_is_asked_whether_it_discharges_before_and_after() -> None:
    text = HEAD + "battery status Discharging\ns 12 0 - 200\nbattery status Not charging\n" + END
    (*_, states) = parse_recording(text).series
    assert (states.channel, states.t_s, states.values) == (DISCHARGING, (0.0, 0.12), (1.0, 0.0))
    unknown = parse_recording(HEAD + "battery status Unknown\n" + END).series
    assert unknown[-1].values == (None,)


@pytest.mark.parametrize(
    "line",
    [
        "s",
        "s 3",
        "s 3 ",
        "s x 0 1",
        "s 3 0 1 2 3 4 5 6",  # more values than channels
        "s 3 0 1 2 / 0 1",  # a channel twice
        "s 3 2 41000 / x 1",
        "s 1 0 1804800",  # back in time
        "s 99999999999 0 1804800",
        "channel 0 kHz cpu_hz:9",  # the number is taken
        "channel 9 kHz volume:9",
        "channel 9 kHz cpu_hz:a b",
        "denied ../../etc/pass wd",
        "garbage",
    ],
)
def test_a_line_that_cannot_be_is_dropped_whole(line: str) -> None:
    good = parse_recording(HEAD + "s 2 0 1804800 100\n" + END)
    bad = parse_recording(HEAD + "s 2 0 1804800 100\n" + line + "\n" + END)
    assert bad.dropped == 1
    assert bad.series == good.series


def test_nothing_follows_the_end() -> None:
    recording = parse_recording(HEAD + END + "s 2 0 1804800 100\n")
    assert (recording.series, recording.dropped) == ((), 1)


def test_zones_of_one_type_stay_apart() -> None:
    text = "channel 0 mC temp_c:cpu\nchannel 1 mC temp_c:cpu\ns 1 0 40000 50000\n"
    names = [one.channel for one in parse_recording(text).series]
    assert names == ["temp_c:cpu", "temp_c:cpu.2"]


@pytest.mark.parametrize(
    ("text", "unit", "channel", "value"),
    [
        ("41000", "mC", "temp_c:x", 41.0),
        ("-5000", "mC", "temp_c:x", -5.0),
        ("-40000", "mC", "temp_c:x", None),
        ("0", "mC", "temp_c:x", None),
        ("127000", "mC", "temp_c:x", None),
        ("42", "mC", "temp_c:x", None),  # it counts in whole degrees
        ("-30", "mC", "temp_c:x", None),
        ("1250", "mC", "temp_c:x", None),  # or in tenths
        ("1300", "mC", "temp_c:x", 1.3),
        ("-273000", "mC", "temp_c:x", None),
        ("2147483647", "mC", "temp_c:x", None),
        ("1e3", "mC", "temp_c:x", None),
        ("0x10", "kHz", "cpu_hz:0", None),
        ("-1804800", "kHz", "cpu_hz:0", None),
        ("0", "kHz", "cpu_hz:0", None),
        ("1804800", "furlong", "cpu_hz:0", None),
        ("-350000", "uA", "battery_a", -0.35),
        ("-350", "uA", "battery_a", None),  # it counts in milliamperes
        ("10000", "uA", "battery_a", None),
        ("4012000", "uV", "battery_v", 4.012),
        ("4012", "uV", "battery_v", None),
        ("٣", "pages", "rss_bytes", None),
    ],
)
def test_units_and_ranges(text: str, unit: str, channel: str, value: float | None) -> None:
    assert parse_value(text, unit, channel, page_bytes=4096) == value


words = st.sampled_from(
    ["s", "channel", "denied", "silent", "battery", "/", "-", "0", "1", "2", "64", "99", "kHz",
     "mC", "pages", "cpu_hz:0", "temp_c:a", "rss_bytes", "41000", "-40000", "period_cs=10",
     "page_bytes=0", "tick_hz=0", "wait=fork", "status", "\x1b[2J", "\n",
     "qnnfarm-telemetry end=exited samples=1 cpu_ticks=1 elapsed_cs=0"]
)  # fmt: skip
lines = st.one_of(st.lists(words, max_size=12).map(" ".join), st.text(max_size=80))


@given(st.lists(lines, max_size=40).map("\n".join))
def test_no_output_breaks_it_or_gives_what_cannot_be(text: str) -> None:
    recording = parse_recording(text)
    assert len(recording.series) <= MOST_CHANNELS
    assert len({one.channel for one in recording.series}) == len(recording.series)
    for one in recording.series:
        assert one.unit == unit_of(one.channel)
        assert one.channel.isascii()
        assert one.channel.isprintable()
        assert list(one.t_s) == sorted(one.t_s)
        for value in one.values:
            assert value is None or math.isfinite(value)
            if one.unit == "degC" and value is not None:
                assert -30 <= value <= 125
    assert all(name.isprintable() for name in (*recording.denied, *recording.silent))
    assert all(word.isprintable() for word in recording.battery.values())


@given(st.integers(), st.sampled_from(["mC", "kHz", "Hz", "uA", "uV", "kB", "pages", "", "x"]))
def test_any_number_is_a_finite_value_or_none(number: int, unit: str) -> None:
    for channel in ("temp_c:x", "cpu_hz:1", "battery_a", "battery_v", "rss_bytes", "other"):
        value = parse_value(str(number), unit, channel, page_bytes=65536)
        assert value is None or math.isfinite(value)
