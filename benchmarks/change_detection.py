"""Change detection beside asv's: `python -m benchmarks.change_detection [--series N]`.

Simulated histories of decode speed, judged each night with only the past known. Each history has
40 to 200 nights without a change, and then ten nights after a loss of 5 %. Noise of a session is
2 % in all; what each kind of series adds is in `KINDS`. A night has one, two or three sessions.

A false alarm is a loss told before the step. A step counts as found if a loss is
told on one of the first three nights at the new level, and as placed if the night told is off by at
most one; the share found within ten nights stands beside it.

asv (a package on PyPI) gets the mean of each night, in seconds a token, without the devices'
offsets: it would keep each device as a machine of its own. It judges the same nights; because it
starts anew each night, only some series are judged on every night before their step.
"""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from harness.results.statistics.changes import History, judge_all

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
    }
)
CORRELATED: Mapping[str, float] = MappingProxyType({"AR(0.5)": 0.5, "AR(0.8)": 0.8})
"""Correlation of a night with the one before."""
WANDERING = ("AR(0.5)", "AR(0.8)", "warm spells", "random walk")
SESSIONS = (1, 2, 3)
NOISE, STEP = 0.02, -0.05
BEFORE, AFTER = (40, 200), 10
NIGHTS_TO_FIND = 3
DEVICES = 3
ASV_THRESHOLDS = (0.05, 0.0)
HEADING = f"{'false':>6} {'in 3':>6} {'in 10':>6} {'placed':>6}"
"""False losses in 1,000 nights; losses found in 3 and 10 nights; of the former, placed right."""


@dataclass(frozen=True)
class Series:
    """A simulated history.

    Attributes:
        logs: logarithms of tokens/s, [night, session].
        offsets: of the session's device.
        step: the row of the first night at the new level.
    """

    logs: npt.NDArray[np.float64]
    devices: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.float64]
    step: int

    def history(self) -> History:
        """Return the series as qnnfarm gets it."""
        nights, sessions = self.logs.shape
        return History(
            values=np.exp(self.logs + self.offsets).ravel().tolist(),
            nights=np.repeat(np.arange(nights), sessions).tolist(),
            devices=[str(device) for device in self.devices.ravel()],
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
        return f"{false:>6} {found:>6} {late:>6} {placed:>6}"


def simulate(random: np.random.Generator, kind: str, sessions: int) -> Series:
    """Draw a series of a kind."""

    def has(part: str) -> bool:
        return kind in {part, "all of them"}

    step = int(random.integers(*BEFORE))
    shape = (nights, _) = (step + AFTER, sessions)
    half = 0.5 if kind == "all of them" else 1.0
    modes = 0.04 * half if has("thermal modes") else 0.0
    sd = math.sqrt(NOISE**2 - 0.16 * modes**2)  # of a mode in a fifth of the sessions
    tails = random.standard_t(3, shape) / math.sqrt(3)
    logs = math.log(50) + sd * (tails if has("heavy tails") else random.standard_normal(shape))
    logs -= modes * (random.random(shape) < 0.2)
    if has("drift"):
        trend = random.choice([-1, 1]) * 0.02 / 100 * np.arange(nights)
        logs += half * (trend + np.cumsum(random.normal(0, 0.0007, nights)))[:, None]
    if has("outliers"):
        off = random.choice([-1, -1, -1, 1], shape) * random.uniform(0.05, 0.3, shape)
        logs += off * (random.random(shape) < 0.03 * half)
    devices, offsets = np.zeros(shape, np.int64), np.zeros(shape)
    if has("device offsets"):
        devices = np.array([random.permutation(DEVICES)[:sessions] for _ in range(nights)])
        offsets = random.normal(0, 0.04, DEVICES)[devices]
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
    logs[step:] += math.log1p(STEP)
    kept = np.ones(nights, bool)
    if has("missing nights"):
        kept = random.random(nights) > 0.15
        gap = int(random.integers(0, nights - 5))
        kept[gap : gap + 5] = False
    return Series(logs[kept], devices[kept], offsets[kept], int(kept[:step].sum()))


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
    return score


def _count_step(score: Score, series: Series, told: tuple[int, int] | None) -> None:
    score.steps += 1
    score.found_late += told is not None
    if told and told[0] < series.step + NIGHTS_TO_FIND:
        score.found += 1
        score.placed += abs(told[1] - series.step) <= 1


def judge_by_asv(series: Sequence[Series], whole: int) -> tuple[Score, ...]:
    """Score asv's step detection, the first `whole` series on every night before the step."""
    from asv.step_detect import detect_regressions, detect_steps

    scores = tuple(Score() for _ in ASV_THRESHOLDS)
    for number, one in enumerate(series):
        slowness = (1 / np.exp(one.logs).mean(axis=1)).tolist()
        first = 8 if number < whole else one.step - 1
        nights = [*range(first, one.step + NIGHTS_TO_FIND), len(slowness) - 1]
        steps = [detect_steps(slowness[: night + 1]) for night in nights]
        for score, threshold in zip(scores, ASV_THRESHOLDS, strict=True):
            known: list[int] = []
            told: tuple[int, int] | None = None
            for night, found in zip(nights, steps, strict=True):
                places = [p[1] for p in detect_regressions(found, threshold)[2] or ()]
                new = [p for p in places if all(abs(p - old) > 3 for old in known)]
                known += new
                if new and night >= one.step:
                    told = told or (night, new[-1])
                elif number < whole:
                    score.false += len(new)
            score.nights += one.step - first if number < whole else 0
            _count_step(score, one, told)
    return scores


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=100, help="of each kind and number")
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--asv-series", type=int, default=3, help="judged by asv on every night")
    parser.add_argument("--sessions", type=int, choices=SESSIONS, help="of a night; default: each")
    parser.add_argument("--without-asv", action="store_true")
    chosen = parser.parse_args()
    print(f"{'':24} {'qnnfarm':27} | {'asv, threshold 5 %':27} | asv, threshold 0 %")
    print(f"{'sessions':8} {'kind':15} " + " | ".join([HEADING] * 3))
    seconds = [0.0, 0.0]
    for sessions in [chosen.sessions] if chosen.sessions else SESSIONS:
        sums = {
            name: tuple(Score() for _ in range(1 + len(ASV_THRESHOLDS)))
            for name in ("independent", "correlated")
        }
        for kind in KINDS:
            random = np.random.default_rng([chosen.seed, sessions, list(KINDS).index(kind)])
            series = [simulate(random, kind, sessions) for _ in range(chosen.series)]
            began = time.process_time()
            scores = [judge(series)]
            between = time.process_time()
            if not chosen.without_asv:
                scores += judge_by_asv(series, chosen.asv_series)
            seconds[0] += between - began
            seconds[1] += time.process_time() - between
            group = sums["correlated" if kind in WANDERING else "independent"]
            for total, score in zip(group, scores, strict=False):
                total.add(score)
            _print_row(sessions, kind, scores)
        for name, group in sums.items():
            _print_row(sessions, name, [score for score in group if score.steps])
    print(f"CPU: qnnfarm {seconds[0]:.0f} s, asv {seconds[1]:.0f} s")


def _print_row(sessions: int, kind: str, scores: Sequence[Score]) -> None:
    print(f"{sessions:8} {kind:15} " + " | ".join(score.show() for score in scores), flush=True)


if __name__ == "__main__":
    main()
