"""Change detection beside other methods: `python -m benchmarks.change_detection [--series N]`.

Simulated histories of decode speed, judged each night with only the past known. Each history has
40 to 200 nights without a change, and then ten nights (of a ramp 60) after a loss of 5 %, or of
`--loss`. Noise of a session is 2 % in all; what each kind of series adds is in `KINDS`. A night has
one, two or three sessions.

A false alarm is a loss told before the step. A step counts as found if a loss is
told on one of the first three nights at the new level, and as placed if the night told is off by at
most one; the share found within ten nights stands beside it.

`PEERS` are judged by the same scores on the first `--peer-series` of each kind. For each kind they
have the most sensitive of their thresholds with which they make no more false alarms in a night
than qnnfarm does in all kinds of the group. So theirs are chosen on the series that are reported,
and qnnfarm's are not. They get the mean of each night, without the offsets of devices that take
turns, and all but CUSUM look at the newest `PEER_NIGHTS` of them anew each night.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from harness.results.history import LEVEL_NIGHTS
from harness.results.statistics.changes import History, SeriesJudgement, judge_all
from harness.results.statistics.medians import half_width

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "steady": "normal noise and nothing else",
        "drift": "a trend of 2 % in 100 nights, up or down, and a random walk of 0.07 % a night",
        "device offsets": "three devices, 4 % apart, drawn anew each night",
        "thermal modes": "a second mode, 4 % slower, in a fifth of sessions (noise: 2 % in all)",
        "outliers": "3 % of sessions are off by 5 to 30 %, three quarters of them slow",
        "missing nights": "15 % of nights and five in a row are missing",
        "heavy tails": "Student's t with 3 degrees of freedom (noise: 2 % in all)",
        "all of them": "all at once, drift, modes and outliers at half strength",
        "AR(0.5)": "three quarters of the variance is of the night, correlated with the last one's",
        "AR(0.8)": "likewise, more correlated",
        "warm spells": "two to six nights are 3 % slower, after 20 nights on average",
        "random walk": "of the level, with steps of 0.4 % a night",
        "sticky heat": "some four sessions in a row are 5 % slower, after 40 on average",
        "whole numbers": "readings are rounded to whole tokens/s, 2 % apart",
        "bimodal": "two modes 4 % apart, by chance (noise: 1 % beside)",
        "one-sided tails": "an exponential part of 2 % makes sessions slower (noise: 1 % beside)",
        "known heat": "sticky heat, whose sessions begin 8 degrees warmer (spread: 2 degrees)",
        "coarse readings": "readings are rounded to 4 % of the value (noise: 1 %)",
        "one of three": "three devices every night, of which one loses 10 %",
        "swapped phone": "another one, 4 % apart, takes the place of the first",
        "ramp": "the loss is 10 % and comes in 60 nights",
    }
)
CORRELATED: Mapping[str, float] = MappingProxyType({"AR(0.5)": 0.5, "AR(0.8)": 0.8})
"""Correlation of a night with the one before."""
APART = ("known heat", "one of three", "swapped phone", "ramp")
"""Kinds that stand beside the others' sums; peers know no heat and no devices."""
UNITS: Mapping[str, float] = MappingProxyType({"whole numbers": 50.0, "coarse readings": 25.0})
"""Levels of kinds that are rounded to whole numbers."""
WANDERING = ("AR(0.5)", "AR(0.8)", "warm spells", "random walk", "sticky heat")
SESSIONS = (1, 2, 3)
NOISE, STEP = 0.02, -0.05
BEFORE, AFTER = (40, 200), 10
STEPS: Mapping[str, float] = MappingProxyType({"one of three": -0.1, "ramp": -0.1})
RAMP = 60
NIGHTS_TO_FIND = 3
DEVICES = 3
PEER_NIGHTS, LEARNED = 60, 8
HEADING = f"{'false':>6} {'in 3':>6} {'in 10':>6} {'placed':>6} {'held':>6}"
"""False losses in 1,000 nights; losses found in 3 and 10 nights; of the former, placed right; of
the latter, those whose interval holds the true size."""
Floats = npt.NDArray[np.float64]
Alarms = Mapping[float, list[tuple[int, int]]]
"""By threshold: the night on which a loss is told, and its first night."""


@dataclass(frozen=True)
class Series:
    """A simulated history.

    Attributes:
        logs: logarithms of tokens/s, [night, session].
        offsets: of the session's device.
        step: the row of the first night at the new level.
        heat: temperatures at the start, [night, session]; None where nobody looked.
        loss: of all at the step; None where it is of a part, or slow.
        is_swapped: whether nobody can know the offsets.
    """

    logs: npt.NDArray[np.float64]
    devices: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.float64]
    step: int
    heat: npt.NDArray[np.float64] | None = None
    loss: float | None = STEP
    is_swapped: bool = False

    @property
    def means(self) -> Floats:
        """Means of nights, as `PEERS` get them."""
        means: Floats = (self.logs + self.offsets * self.is_swapped).mean(axis=1)
        return means

    def history(self) -> History:
        """Return the series as qnnfarm gets it."""
        nights, sessions = self.logs.shape
        return History(
            values=np.exp(self.logs + self.offsets).ravel().tolist(),
            nights=np.repeat(np.arange(nights), sessions).tolist(),
            devices=[str(device) for device in self.devices.ravel()],
            heat=() if self.heat is None else self.heat.ravel().tolist(),
        )


@dataclass
class Score:
    """Sums over series."""

    nights: int = 0
    false: int = 0
    steps: int = 0
    found: int = 0
    found_late: int = 0
    placed: int = 0
    sized: int = 0
    held: int = 0

    def add(self, other: "Score") -> None:
        """Add another's sums."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def show(self) -> str:
        """Format as the columns of `HEADING`."""
        false = f"{1000 * self.false / self.nights:.2f}" if self.nights else "-"
        found = f"{self.found / self.steps:.1%}" if self.steps else "-"
        late = f"{self.found_late / self.steps:.1%}" if self.steps else "-"
        placed = f"{self.placed / self.found:.1%}" if self.found else "-"
        held = f"{self.held / self.sized:.1%}" if self.sized else "-"
        return f"{false:>6} {found:>6} {late:>6} {placed:>6} {held:>6}"


def simulate(
    random: np.random.Generator, kind: str, sessions: int, step_size: float = STEP
) -> Series:
    """Draw a series of a kind; `STEPS` has kinds with a step of their own."""

    def has(part: str) -> bool:
        return kind in {part, "all of them"}

    step = int(random.integers(*BEFORE))
    sessions *= DEVICES if kind == "one of three" else 1
    shape = (nights, _) = (step + (RAMP if kind == "ramp" else AFTER), sessions)
    half = 0.5 if kind == "all of them" else 1.0
    modes = 0.04 * half if has("thermal modes") else 0.0
    sd = math.sqrt(NOISE**2 - 0.16 * modes**2)  # of a mode in a fifth of the sessions
    tails = random.standard_t(3, shape) / math.sqrt(3)
    logs = math.log(UNITS.get(kind, 50)) + sd * (
        tails if has("heavy tails") else random.standard_normal(shape)
    )
    logs -= modes * (random.random(shape) < 0.2)
    if has("drift"):
        trend = random.choice([-1, 1]) * 0.02 / 100 * np.arange(nights)
        logs += half * (trend + np.cumsum(random.normal(0, 0.0007, nights)))[:, None]
    if has("outliers"):
        off = random.choice([-1, -1, -1, 1], shape) * random.uniform(0.05, 0.3, shape)
        logs += off * (random.random(shape) < 0.03 * half)
    devices = _devices(random, "device offsets" if has("device offsets") else kind, shape, step)
    offsets = random.normal(0, 0.04, DEVICES)[devices] * (devices.max() > 0)
    if kind in CORRELATED:
        logs = math.log(50) + (logs - math.log(50)) / 2
        logs += math.sqrt(0.75) * NOISE * _autoregress(random, nights, CORRELATED[kind])[:, None]
    if kind == "warm spells":
        night = int(random.exponential(20))
        while night < nights:
            length = int(random.integers(2, 7))
            logs[night : night + length] -= 0.03
            night += length + 1 + int(random.exponential(20))
    if kind == "random walk":
        logs += np.cumsum(random.normal(0, 0.004, nights))[:, None]
    logs, heat = _sessions(random, kind, logs)
    part = np.clip((np.arange(nights) - step + 1) / (RAMP if kind == "ramp" else 1), 0, 1)[:, None]
    part = part * (devices == 0) if kind == "one of three" else part
    logs += math.log1p(STEPS.get(kind, step_size)) * part
    if kind in UNITS:
        logs = np.log(np.rint(np.exp(logs)))
    kept = np.ones(nights, bool)
    if has("missing nights"):
        kept = random.random(nights) > 0.15
        gap = int(random.integers(0, nights - 5))
        kept[gap : gap + 5] = False
    return Series(
        logs[kept], devices[kept], offsets[kept], int(kept[:step].sum()), heat,
        None if kind in STEPS else step_size, kind == "swapped phone",
    )  # fmt: skip


def _devices(
    random: np.random.Generator, kind: str, shape: tuple[int, int], step: int
) -> npt.NDArray[np.int64]:
    """Draw the device of each session."""
    nights, sessions = shape
    if kind == "device offsets":
        return np.array([random.permutation(DEVICES)[:sessions] for _ in range(nights)])
    if kind == "one of three":
        return np.tile(np.arange(sessions) % DEVICES, (nights, 1))
    devices = np.zeros(shape, np.int64)
    if kind == "swapped phone":
        devices[random.integers(12, step - 15) :] = 1
    return devices


def _sessions(random: np.random.Generator, kind: str, logs: Floats) -> tuple[Floats, Floats | None]:
    """Shape the noise of sessions as a kind has it; with the heat where it is known."""
    half = (logs + math.log(UNITS.get(kind, 50))) / 2
    if kind == "bimodal":
        return half + 0.04 * (random.random(logs.shape) < 0.5), None
    if kind == "one-sided tails":
        return half - random.exponential(0.02, logs.shape), None
    if kind == "coarse readings":
        return half + random.uniform(-0.02, 0.02), None
    if kind in {"sticky heat", "known heat"}:
        lost = _spells(random, logs.size).reshape(logs.shape)
        heat = 33 + 8 * (lost < 0) + 2 * random.standard_normal(logs.shape)
        return logs + lost, heat if kind == "known heat" else None
    return logs, None


def _spells(random: np.random.Generator, sessions: int) -> npt.NDArray[np.float64]:
    """Draw the slow-down of sessions that stay hot once they are."""
    lost, session = np.zeros(sessions), int(random.exponential(40))
    while session < sessions:
        length = int(random.geometric(0.25))
        lost[session : session + length] = -0.05
        session += length + 1 + int(random.exponential(40))
    return lost


def _autoregress(
    random: np.random.Generator, nights: int, correlation: float
) -> npt.NDArray[np.float64]:
    """Draw a stationary series of variance 1."""
    values = random.standard_normal(nights)
    for night in range(1, nights):
        values[night] *= math.sqrt(1 - correlation**2)
        values[night] += correlation * values[night - 1]
    return values


def judge(series: Sequence[Series]) -> Score:
    """Score qnnfarm's detection."""
    score = Score()
    for one, judged in zip(series, judge_all([s.history() for s in series]), strict=True):
        changes = judged.changes
        score.nights += one.step
        score.false += sum(change.found < one.step and change.is_loss for change in changes)
        told = next((c for c in changes if c.found >= one.step and c.is_loss), None)
        _count_step(score, one, None if told is None else (told.found, told.night))
        if told is not None and one.loss is not None:
            score.sized += 1
            score.held += _holds(one, one.loss, told.night, judged)
    return score


def _holds(series: Series, loss: float, night: int, judged: SeriesJudgement) -> bool:
    """Return whether the interval that a report shows of a loss holds its true size."""
    nights = series.logs.mean(axis=1)
    before = nights[max(night - LEVEL_NIGHTS, 0) : night].tolist()
    since = nights[night : night + LEVEL_NIGHTS].tolist()
    half = half_width(before, since, judged.wandering, judged.unit)
    off = float(np.median(since) - np.median(before)) - math.log1p(loss)
    return half is not None and abs(off) <= half


def _count_step(score: Score, series: Series, told: tuple[int, int] | None) -> None:
    score.steps += 1
    score.found_late += told is not None
    if told and told[0] < series.step + NIGHTS_TO_FIND:
        score.found += 1
        score.placed += abs(told[1] - series.step) <= 1


def _every_night(
    find: Callable[[Floats, Sequence[float]], Iterable[Sequence[int]]],
) -> Callable[..., Alarms]:
    """Make a method of one that finds all losses of a series; what it found before is no news."""

    def judge_nights(logs: Floats, thresholds: Sequence[float]) -> Alarms:
        alarms: dict[float, list[tuple[int, int]]] = {one: [] for one in thresholds}
        for night in range(LEARNED, len(logs)):
            first = max(0, night + 1 - PEER_NIGHTS)
            losses = find(logs[first : night + 1], thresholds)
            for told, found in zip(alarms.values(), losses, strict=True):
                places = [first + place for place in found]
                new = [p for p in places if all(abs(p - old) > 3 for _, old in told)]
                told += [(night, place) for place in new]
        return alarms

    return judge_nights


def _asv(logs: Floats, thresholds: Sequence[float]) -> Iterator[Sequence[int]]:
    from asv.step_detect import detect_regressions, detect_steps

    steps = detect_steps((1 / np.exp(logs)).tolist())
    for threshold in thresholds:
        yield [place for _, place, *_ in detect_regressions(steps, threshold)[2] or ()]


def _pelt(logs: Floats, penalties: Sequence[float]) -> Iterator[Sequence[int]]:
    import ruptures

    noise = np.median(np.abs(np.diff(logs))) / 0.954  # of differences of normal values
    model = ruptures.KernelCPD(kernel="linear", min_size=2).fit(logs[:, None] / noise)
    for penalty in penalties:
        yield _losses(logs, model.predict(pen=penalty)[:-1])


def _e_divisive(logs: Floats, p_values: Sequence[float]) -> Iterator[Sequence[int]]:
    """Find losses as Apache Otava does in one window."""
    from otava import analysis

    for p_value in p_values:
        tester = analysis.TTestSignificanceTester(10 * p_value)
        detector = analysis.ChangePointDetector(tester, analysis.PairDistanceCalculator)
        weak = detector.get_change_points(logs)
        intervals = tester.get_intervals(weak)
        weak = [tester.change_point(one.to_candidate(), logs, intervals) for one in weak]
        places = [int(one.index) for one in analysis.merge(weak, logs, p_value, 0.0)]
        yield _losses(logs, places)


def _losses(logs: Floats, places: Sequence[int]) -> Sequence[int]:
    means = [part.mean() for part in np.split(logs, places)]
    return [place for place, was, now in zip(places, means, means[1:], strict=False) if now < was]


def _cusum(logs: Floats, thresholds: Sequence[float]) -> Alarms:
    """Judge by E. S. Page's sums (Biometrika 41, 1954) about the median of all nights so far."""
    alarms: dict[float, list[tuple[int, int]]] = {}
    for threshold in thresholds:
        told = alarms[threshold] = []
        start, first, total = 0, 0, 0.0
        for night in range(len(logs)):
            if night - start < LEARNED:
                first, total = night + 1, 0.0
                continue
            past = logs[start:first]
            noise = max(1.4826 * np.median(np.abs(past - np.median(past))), 0.001)
            total += (np.median(past) - logs[night] + STEP / 2) / noise
            if total <= 0:
                first, total = night + 1, 0.0
            elif total > threshold:
                told.append((night, first))
                start, first, total = first, night + 1, 0.0
    return alarms


PEERS: Mapping[str, tuple[Callable[..., Alarms], Sequence[float]]] = MappingProxyType(
    {
        "asv": (_every_night(_asv), (0.0, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.2)),
        "PELT": (_every_night(_pelt), (8, 11, 14, 17, 20, 25, 30, 40, 60, 100, 200)),
        "E-divisive": (_every_night(_e_divisive), (1e-3, 1e-5, 1e-7, 1e-9, 1e-12)),
        "CUSUM": (_cusum, (3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 30)),
    }
)
"""Methods with their thresholds, the most sensitive first."""
PACKAGES: Mapping[str, str] = MappingProxyType(
    {"asv": "asv", "PELT": "ruptures", "E-divisive": "otava"}
)
"""What methods need, of the extra `benchmark`."""


def find_peers() -> dict[str, tuple[Callable[..., Alarms], Sequence[float]]]:
    """Return the methods whose packages are installed."""
    missing = {name for name, package in PACKAGES.items() if find_spec(package) is None}
    return {name: peer for name, peer in PEERS.items() if name not in missing}


def judge_peers(kinds: Sequence[Sequence[Series]], most_false: float) -> dict[str, Score]:
    """Score each peer, for each kind with the first threshold that is so seldom wrong."""
    peers = find_peers()
    sums = {name: Score() for name in peers}
    for series, (name, (judge_series, thresholds)) in product(kinds, peers.items()):
        scores = {threshold: Score() for threshold in thresholds}
        for one in series:
            for threshold, told in judge_series(one.means, thresholds).items():
                scores[threshold].nights += one.step
                scores[threshold].false += sum(night < one.step for night, _ in told)
                found = next((alarm for alarm in told if alarm[0] >= one.step), None)
                _count_step(scores[threshold], one, found)
        fit = (score for score in scores.values() if score.false <= most_false * score.nights)
        sums[name].add(next(fit, scores[thresholds[-1]]))
    return sums


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=100, help="of each kind and number")
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--peer-series", type=int, default=10, help="of each kind; 0: no peers")
    parser.add_argument("--sessions", type=int, choices=SESSIONS, help="of a night; default: each")
    parser.add_argument("--loss", type=float, default=-STEP, help="at the step, as 0.03")
    chosen = parser.parse_args()
    print(f"{'sessions':8} {'kind or method':32} {HEADING}")
    began = time.process_time()
    for sessions in [chosen.sessions] if chosen.sessions else SESSIONS:
        sums = {group: Score() for group in ("independent", "correlated", *APART)}
        shown: dict[str, list[Sequence[Series]]] = {name: [] for name in sums}
        for kind in KINDS:
            random = np.random.default_rng([chosen.seed, sessions, list(KINDS).index(kind)])
            series = [simulate(random, kind, sessions, -chosen.loss) for _ in range(chosen.series)]
            group = kind if kind in APART else "independent"
            group = "correlated" if kind in WANDERING else group
            score = judge(series)
            sums[group].add(score)
            shown[group].append(series[: chosen.peer_series])
            _print_row(sessions, kind, score)
        for group, total in sums.items():
            _print_row(sessions, f"{group}: qnnfarm", total)
            if chosen.peer_series:
                peers = judge_peers(shown[group], total.false / max(total.nights, 1))
                for name, score in peers.items():
                    _print_row(sessions, f"{group}: {name}", score)
    print(f"CPU: {time.process_time() - began:.0f} s")


def _print_row(sessions: int, kind: str, score: Score) -> None:
    print(f"{sessions:8} {kind:32} {score.show()}", flush=True)


if __name__ == "__main__":
    main()
