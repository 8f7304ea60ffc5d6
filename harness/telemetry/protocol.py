"""Strict reader of the recordings of `telemetry.sh` (device_scripts/README.md).

The text of a sensor file becomes a plausible number in the unit of its channel.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from harness.results.derived import DISCHARGING
from harness.results.records import TelemetrySeries

_INTEGER = re.compile(r"-?[0-9]{1,18}")

COLDEST_C, HOTTEST_C = -30.0, 125.0
"""Outside of these no phone works; what its sensors then say is something else."""
_SENTINELS_C = frozenset({-40.0, 127.0})
"""Values of sensors that are missing, unpowered or not ready; 0 is one too."""


class _Quantity(NamedTuple):
    """Between `lowest` and `highest`; nearer to 0 than `least` it counts in another unit."""

    unit: str
    lowest: float
    highest: float
    least: float = 0.0


_QUANTITIES = {
    "temp_c": _Quantity("degC", COLDEST_C, HOTTEST_C, least=1.25),  # else in whole or tenths of one
    "cpu_hz": _Quantity("Hz", 1e6, 1e10),
    "cpu_cap_hz": _Quantity("Hz", 1e6, 1e10),
    "ddr_hz": _Quantity("Hz", 1e6, 2e10),
    "gpu_hz": _Quantity("Hz", 1e6, 1e10),
    "rss_bytes": _Quantity("bytes", 1, 1e13),
    "rss_peak_bytes": _Quantity("bytes", 1, 1e13),
    "battery_a": _Quantity("A", -30, 30, least=0.03),  # else in milliamperes
    "battery_v": _Quantity("V", 1, 60),
}
_PER_WIRE_UNIT = {"mC": 1e3, "uA": 1e6, "uV": 1e6}
_WIRE_UNITS = {"kHz": 1000, "Hz": 1, "kB": 1024}


def kind_of(channel: str) -> str:
    """Return the quantity of a channel: `temp_c` of `temp_c:cpu-0-0`."""
    return channel.partition(":")[0]


def unit_of(channel: str) -> str | None:
    """Return the unit of a channel's values; `None` for a channel that is not known."""
    quantity = _QUANTITIES.get(kind_of(channel))
    return None if quantity is None else quantity.unit


def parse_value(text: str, wire_unit: str, channel: str, *, page_bytes: int) -> float | None:
    """Return a value of a channel; `None` if it is not a plausible number.

    Args:
        text: as the file said it.
        wire_unit: in which it counts: `mC`, `kHz`, `Hz`, `uA`, `uV`, `kB`, `pages`.
        channel: e.g. `temp_c:cpu-0-0`.
        page_bytes: size of a page of memory on the device.
    """
    quantity = _QUANTITIES.get(kind_of(channel))
    if quantity is None or not _INTEGER.fullmatch(text):
        return None
    number = int(text)
    if wire_unit in _PER_WIRE_UNIT:
        value = number / _PER_WIRE_UNIT[wire_unit]
    elif wire_unit == "pages":
        value = float(number * page_bytes)
    elif wire_unit in _WIRE_UNITS:
        value = float(number * _WIRE_UNITS[wire_unit])
    else:
        return None
    if quantity.unit == "degC" and value in _SENTINELS_C:
        return None
    if abs(value) <= quantity.least:
        return None
    return value if quantity.lowest <= value <= quantity.highest else None


MOST_BYTES = 4 << 20
"""Of a recording: the script stops short of it."""
MOST_CHANNELS = 64

_SETTING = re.compile(r"(format|period_cs|page_bytes|tick_hz)=([0-9]{1,6})|wait=(read|fork)")
_CHANNEL = re.compile(
    r"channel ([0-9]{1,2}) ([A-Za-z]{1,8}) ([a-z_]{1,20}(?::[A-Za-z0-9._-]{1,60})?)"
)
_UNREADABLE = re.compile(r"(denied|silent) ([A-Za-z0-9_./:,@-]{1,200})")
_BATTERY = re.compile(r"battery (capacity|temp|status|health) ([ -~]{1,60})")
_TIME = re.compile(r"-?[0-9]{1,9}")
_END = re.compile(
    r"qnnfarm-telemetry end=([a-z]{1,20}) samples=([0-9]{1,9}) cpu_ticks=([0-9]{1,9})"
    r" elapsed_cs=(-?[0-9]{1,9})"
)
_DISCHARGES = {"Discharging": 1.0, "Charging": 0.0, "Full": 0.0, "Not charging": 0.0}

Unreadable = Literal["denied", "silent"]


@dataclass(frozen=True, slots=True)
class Channel:
    """A sensor file: its name here, and the unit in which it counts."""

    name: str
    wire_unit: str


@dataclass(frozen=True, slots=True)
class TelemetryRecording:
    """Samples of a run.

    Attributes:
        series: one a channel that gave anything, in the script's order.
        channels: names of all channels, also of those that gave nothing that can be.
        denied: sensor files that the device's shell user may not read.
        silent: sensor files that are there and say nothing.
        battery: the device's own words about its battery.
        forks: whether waiting took a process for each sample, which slows the sampling down.
        end: why it ended: `exited` with the run, `stopped`, `orphaned`, `deadline`, `full`,
            `once`; empty when the end is missing.
        cpu_share: of one core that the sampler took, its start and end included.
        dropped: lines that could not be understood.
    """

    series: tuple[TelemetrySeries, ...] = ()
    channels: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    battery: Mapping[str, str] = field(default_factory=dict)
    forks: bool = False
    end: str = ""
    cpu_share: float | None = None
    dropped: int = 0

    def latest(self, kind: str) -> dict[str, float]:
        """Return the last value of each channel of a kind, by its name behind the colon."""
        result = {}
        for series in self.series:
            name, _, rest = series.channel.partition(":")
            values = [value for value in series.values if value is not None]
            if name == kind and values:
                result[rest] = values[-1]
        return result


def parse_recording(text: str) -> TelemetryRecording:
    """Read a recording, whole or cut short; lines that cannot be read are dropped and counted."""
    reader = _Reader()
    for line in text[:MOST_BYTES].splitlines():
        reader.take(line)
    return reader.finish()


class _Reader:
    def __init__(self) -> None:
        self._settings = {"page_bytes": 4096, "tick_hz": 100}
        self._channels: dict[int, Channel] = {}
        self._samples: dict[int, tuple[list[float], list[float | None]]] = {}
        self._unreadable: dict[Unreadable, list[str]] = {"denied": [], "silent": []}
        self._battery: dict[str, str] = {}
        self._states: list[tuple[float, float | None]] = []
        self._forks = False
        self._end = ""
        self._cpu_share: float | None = None
        self._latest = -(10**9)
        self._dropped = 0

    def take(self, line: str) -> None:
        understood = not self._end and (
            self._take_sample(line) if line.startswith("s ") else self._take_word(line)
        )
        self._dropped += not understood

    def _take_word(self, line: str) -> bool:
        if match := _SETTING.fullmatch(line):
            if match[1]:
                self._settings[match[1]] = max(1, int(match[2]))
            self._forks |= match[3] == "fork"
        elif match := _CHANNEL.fullmatch(line):
            return self._add_channel(int(match[1]), Channel(match[3], match[2]))
        elif match := _UNREADABLE.fullmatch(line):
            kind: Unreadable = "denied" if match[1] == "denied" else "silent"
            if len(self._unreadable[kind]) < 4 * MOST_CHANNELS:
                self._unreadable[kind].append(match[2])
        elif match := _BATTERY.fullmatch(line):
            self._battery[match[1]] = match[2].strip()
            if match[1] == "status":
                at = max(0, self._latest, *(round(100 * t) for t, _ in self._states)) / 100
                self._states.append((at, _DISCHARGES.get(match[2].strip())))
        elif match := _END.fullmatch(line):
            self._end = match[1]
            elapsed_s = int(match[4]) / 100
            if elapsed_s > 0:
                self._cpu_share = int(match[3]) / self._settings["tick_hz"] / elapsed_s
        else:
            return False
        return True

    def _add_channel(self, number: int, channel: Channel) -> bool:
        if number in self._channels or number >= MOST_CHANNELS or unit_of(channel.name) is None:
            return False
        names = {other.name for other in self._channels.values()}
        name, count = channel.name, 2
        while name in names:  # two zones of one type
            name = f"{channel.name}.{count}"
            count += 1
        self._channels[number] = Channel(name, channel.wire_unit)
        self._samples[number] = ([], [])
        return True

    def _take_sample(self, line: str) -> bool:
        """Take `s TIME FIRST VALUE... [/ FIRST VALUE...]...`: all of it, or nothing."""
        _, time, *rest = line.split(" ")
        if not _TIME.fullmatch(time) or int(time) < self._latest:
            return False
        sample: dict[int, float | None] = {}
        for group in " ".join(rest).split(" / "):
            first, *values = group.split(" ")
            if not re.fullmatch("[0-9]{1,2}", first):
                return False
            for number, text in enumerate(values, int(first)):
                channel = self._channels.get(number)
                if channel is None or number in sample:
                    return False
                page_bytes = self._settings["page_bytes"]
                sample[number] = parse_value(
                    text, channel.wire_unit, channel.name, page_bytes=page_bytes
                )
        self._latest = int(time)
        for number, value in sample.items():
            times, series = self._samples[number]
            times.append(self._latest / 100)
            series.append(value)
        return True

    def finish(self) -> TelemetryRecording:
        return TelemetryRecording(
            series=tuple(self._series()),
            channels=tuple(channel.name for _, channel in sorted(self._channels.items())),
            denied=tuple(self._unreadable["denied"]),
            silent=tuple(self._unreadable["silent"]),
            battery=self._battery,
            forks=self._forks,
            end=self._end,
            cpu_share=self._cpu_share,
            dropped=self._dropped,
        )

    def _series(self) -> Iterable[TelemetrySeries]:
        for number, channel in sorted(self._channels.items()):
            times, values = self._samples[number]
            unit = unit_of(channel.name)
            if unit is not None and any(value is not None for value in values):
                yield TelemetrySeries(channel.name, unit, tuple(times), tuple(values))
        if self._states and self._samples:
            yield TelemetrySeries(DISCHARGING, "", *zip(*self._states, strict=True))
