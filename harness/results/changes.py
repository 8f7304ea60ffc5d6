"""Detection of level changes in histories of measurements.

Judges each night with only the nights before it known, as a nightly job has to. The method is the
mixture likelihood ratio over a window of recent nights (T. L. Lai, "Information bounds and quick
detection of parameter changes in stochastic systems", IEEE Transactions on Information Theory 44,
1998, pages 2917-2929), against the forecast of a dynamic linear model, as in West and Harrison,
"Monitoring and adaptation in Bayesian forecasting models", JASA 81, 1986, pages 741-750:

- The expected value is a level that drifts slowly plus an offset for each device. A Kalman filter
  with bounded innovations follows both; it takes in a night only when that night can no longer be
  part of a change. A new device therefore says nothing until its offset is known.
- The density of noise is learned from the series' own residuals (a kernel estimate mixed with
  Student's t), so heavy tails, outliers and a thermal second mode become
  unremarkable where they are usual.
- A change that began `w` nights ago has the statistic `log mean over sizes of
  exp(sum of log-likelihood ratios)`, reduced by the design effect of sessions that share a night
  (L. Kish, "Survey Sampling", 1965) and by the uncertainty of the level. A night's ratio is
  bounded, so at least two nights have to agree.

The thresholds are those at which `benchmarks/change_detection.py` sees at most one false alarm in
1,000 nights of a series.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIN_NIGHTS = 8
"""Nights before the first one that can be judged."""
WINDOW = 12
"""Nights that a change can lie back when it is found."""
SMALLEST = 0.025
"""Smallest change that is looked for, as a part of the value."""

_SIZES = np.array([1, 1.4, 2, 2.8, 4, 6, 10, 16])
"""Sizes of changes that are looked for, in units of the smallest one."""
_SIZES_OF_NOISE = np.array([0, 0, 0, 0, 0, 2, 4, 8])
"""What they are at least, in units of the noise: else the greatest of a noisy series are as
unremarkable as its outliers."""
_NEVER = 1e9
THRESHOLDS = np.array([_NEVER, 5.6, 4.5, *[7.0] * (WINDOW - 3)])
"""Of the statistic of a loss, by the nights since it began; one night is never enough."""
EARLY_MARGIN, EARLY_NIGHTS = 2.0, 20
"""Added to them while a level is new; nothing is left of it after so many judged nights."""
GAIN_MARGIN = 1.5
"""Added to them for a gain, of which nobody has to be told at once."""
_SHORTEST = 4
"""Window at a level that is new."""
_NIGHT_BOUND = 4.0
_DRIFT = 0.03
"""Standard deviation of the level's drift in a night, in units of the noise."""
_OFFSET_SD = 0.05
"""Of devices of one model, about their mean."""
_JUMP_SD = 0.3
"""Of the level at a change, at least."""
_MEMORY = 150
"""Residuals of sessions from which noise is learned."""
_BANDWIDTH = 0.5
_PRIOR_WEIGHT, _PRIOR_DF, _PRIOR_PEAK = 20.0, 6.0, 0.3827
_CLIP = 3.0
"""Bound of innovations in standard deviations."""
_OUTLIER = 5.0
"""Bound of the first nights of a series of one device, about their median, likewise."""
_FEWEST = 5
"""Residuals from which the noise is estimated anew."""
_BATCH = 128
"""Series that are judged together."""


@dataclass(frozen=True, slots=True)
class History:
    """Sessions of one series, in the order in which they ran.

    Attributes:
        values: above 0, one for each session.
        nights: number of the night of each session, ascending; numbers may be left out.
        devices: the device of each session.
        higher_is_better: the direction of a gain.
        smallest: smallest change to look for, as a part of the value.
    """

    values: Sequence[float]
    nights: Sequence[int]
    devices: Sequence[str]
    higher_is_better: bool = True
    smallest: float = SMALLEST


@dataclass(frozen=True, slots=True)
class Change:
    """A change of level.

    Attributes:
        night: the first night at the new level.
        found: the night on which it became certain enough to tell.
        ratio: new level over old one, as seen when it was found.
        is_loss: whether it is for the worse.
    """

    night: int
    found: int
    ratio: float
    is_loss: bool


def detect(history: History) -> tuple[Change, ...]:
    """Find the changes of one series, judging each night by the past alone."""
    return detect_all([history])[0]


def detect_all(histories: Sequence[History]) -> tuple[tuple[Change, ...], ...]:
    """Find the changes of many series at once, which is far faster than one by one.

    Raises:
        ValueError: a value is not above 0, nights do not ascend, or lengths differ.
    """
    found: list[tuple[Change, ...]] = [()] * len(histories)
    whole = [number for number, history in enumerate(histories) if len(history.values)]
    whole.sort(key=lambda number: len(set(histories[number].nights)))
    for first in range(0, len(whole), _BATCH):
        chosen = whole[first : first + _BATCH]
        for number, changes in zip(chosen, _judge([histories[n] for n in chosen]), strict=True):
            found[number] = changes
    return tuple(found)


def _judge(histories: Sequence[History]) -> list[tuple[Change, ...]]:
    return _Watch(_Table.of(histories), histories).run()


@dataclass(slots=True)
class _Table:
    """Logarithms of a batch's values by series, night and session; NaN where there is none.

    Losses go down whatever the metric.
    """

    logs: Floats
    devices: Ints
    nights: list[list[int]]

    @classmethod
    def of(cls, histories: Sequence[History]) -> "_Table":
        placed = [_place(history) for history in histories]
        most = max(max(slots) for slots, _, _ in placed) + 1
        longest = max(len(nights) for _, _, nights in placed)
        logs = np.full((len(histories), longest, most), np.nan)
        devices = np.zeros(logs.shape, np.int64)
        for series, (history, (slots, rows, _)) in enumerate(zip(histories, placed, strict=True)):
            names = {name: number for number, name in enumerate(dict.fromkeys(history.devices))}
            sign = 1.0 if history.higher_is_better else -1.0
            logs[series, rows, slots] = sign * np.log(np.asarray(history.values, float))
            devices[series, rows, slots] = [names[name] for name in history.devices]
        return cls(logs, devices, [nights for _, _, nights in placed])


def _place(history: History) -> tuple[list[int], list[int], list[int]]:
    """Return slot and row of each session, its place in its night; and the night of each row."""
    if not len(history.values) == len(history.nights) == len(history.devices):
        raise ValueError("values, nights and devices are not of one length")
    if not all(0 < value < np.inf for value in history.values):
        raise ValueError("only finite values above 0 can be judged")
    slots: list[int] = []
    rows: list[int] = []
    nights: list[int] = []
    for night in history.nights:
        if nights and night < nights[-1]:
            raise ValueError("nights do not ascend")
        if nights and night == nights[-1]:
            slots.append(slots[-1] + 1)
        else:
            nights.append(night)
            slots.append(0)
        rows.append(len(nights) - 1)
    return slots, rows, nights


class _Forecast:
    """Level, device offsets and noise of each series of a batch, from the nights taken in."""

    def __init__(self, table: _Table, floors: Floats) -> None:
        self.logs, self.devices = table.logs, table.devices
        self.present = ~np.isnan(table.logs)
        series, _, _ = table.logs.shape
        states = int(table.devices.max()) + 2
        first = table.logs[:, :MIN_NIGHTS].reshape(series, -1)
        middle = np.nanmedian(first, axis=1)
        self.floors = floors
        self.noise = np.maximum(_spread(first - middle[:, None]), floors)
        self.noise *= 1 + 3 / np.count_nonzero(~np.isnan(first), axis=1)
        # The first night of a device says where its level is, unless it is an outlier.
        alone = table.devices[:, :MIN_NIGHTS].max(axis=(1, 2)) == 0
        bound = np.where(alone, _OUTLIER * self.noise, np.inf)[:, None, None]
        level = middle[:, None, None]
        early = np.clip(table.logs[:, :MIN_NIGHTS], level - bound, level + bound)
        self.logs = np.concatenate([early, table.logs[:, MIN_NIGHTS:]], axis=1)
        self.state = np.zeros((series, states))
        self.state[:, 0] = middle
        self.covariance = np.zeros((series, states, states))
        diagonal = np.arange(states)
        self.covariance[:, diagonal, diagonal] = _OFFSET_SD**2
        self.covariance[:, 0, 0] += self.noise**2 / MIN_NIGHTS
        self.residuals = np.full((series, _MEMORY), np.nan)
        self.count = np.zeros(series, np.int64)
        # Products of sessions of one night, and squares: their ratio is the correlation.
        self.shared = np.full(series, 3.0)
        self.squares = np.full(series, 10.0)

    def compare(self, rows: Ints, nights: Ints) -> tuple[Floats, Floats, Floats]:
        """Return residuals of a night of each row, their number, and their forecast's variance."""
        present, devices = self.present[rows, nights], self.devices[rows, nights] + 1
        state = self.state[rows]
        expected = state[:, :1] + np.take_along_axis(state, devices, 1)
        residuals = np.where(present, self.logs[rows, nights] - expected, 0.0)
        sessions = present.sum(1).astype(float)
        weights = np.zeros_like(state)
        weights[:, 0] = 1
        for slot in range(present.shape[1]):
            weights[np.arange(len(rows)), devices[:, slot]] += present[:, slot] / sessions
        variance = np.einsum("si,sij,sj->s", weights, self.covariance[rows], weights)
        return residuals, sessions, variance

    def take_in(self, rows: Ints, nights: Ints, *, learn: bool = True) -> None:
        """Update level, offsets and noise by a night of each row."""
        self.covariance[rows, 0, 0] += (_DRIFT * self.noise[rows]) ** 2
        residuals, sessions, variance = self.compare(rows, nights)
        noise = self.noise[rows]
        design = self._design(rows, sessions)
        each = np.arange(len(rows))
        for slot in range(residuals.shape[1]):
            present, device = self.present[rows, nights, slot], self.devices[rows, nights, slot] + 1
            covariance, state = self.covariance[rows], self.state[rows]
            gain = covariance[:, 0] + covariance[each, device]
            total = gain[:, 0] + gain[each, device] + noise**2 * design
            error = np.nan_to_num(self.logs[rows, nights, slot]) - state[:, 0] - state[each, device]
            bound = _CLIP * np.sqrt(total)
            error = np.clip(error, -bound, bound)
            step = gain / total[:, None] * present[:, None]
            self.state[rows] = state + step * error[:, None]
            self.covariance[rows] = covariance - step[:, :, None] * gain[:, None, :]
        if learn:
            self._learn(rows, nights, residuals / np.sqrt(1 + variance / noise**2)[:, None])

    def _design(self, rows: Ints, sessions: Floats) -> Floats:
        """Return the number of sessions of a night that are worth one which shares nothing."""
        correlation = np.clip(self.shared[rows] / self.squares[rows], 0, 1)
        design: Floats = 1 + (sessions - 1) * correlation
        return design

    def _learn(self, rows: Ints, nights: Ints, residuals: Floats) -> None:
        present = self.present[rows, nights]
        bounded = np.clip(residuals / self.noise[rows, None], -_CLIP, _CLIP)
        others = np.maximum(present.sum(1) - 1, 1)
        squares = (bounded**2).sum(1)
        several = present.sum(1) > 1
        shared = (bounded.sum(1) ** 2 - squares) / others
        self.shared[rows] = np.where(several, 0.98 * self.shared[rows] + shared, self.shared[rows])
        self.squares[rows] = np.where(
            several, 0.98 * self.squares[rows] + squares, self.squares[rows]
        )
        for slot in range(present.shape[1]):
            here = rows[present[:, slot]]
            self.residuals[here, self.count[here] % _MEMORY] = residuals[present[:, slot], slot]
            self.count[here] += 1
        known = rows[self.count[rows] >= _FEWEST]
        if len(known):
            spread = np.maximum(_spread(self.residuals[known]), self.floors[known])
            self.noise[known] = spread * (1 + 2 / np.minimum(self.count[known], _MEMORY))

    def log_ratios(self, rows: Ints, night: int, changes: Floats) -> tuple[Floats, Floats, Floats]:
        """Compute log-likelihood ratios of each change of level against none, from a night a row.

        Returns:
            them; how many independent sessions the night is worth; the forecast's variance in units
            of the noise's.
        """
        residuals, sessions, variance = self.compare(rows, np.full(len(rows), night))
        greatest = changes.max(1, keepdims=True)  # what is farther off is at least that
        residuals = np.clip(residuals, -greatest, greatest)
        noise, present = self.noise[rows], self.present[rows, night]
        learned = int(min(self.count[rows].max(), _MEMORY))
        points = self.residuals[rows, :learned] / noise[:, None] / np.sqrt(1 + _BANDWIDTH**2)
        points[np.isnan(points)] = np.inf  # far from everything, so without weight
        levels = np.concatenate([np.zeros((len(rows), 1)), changes], axis=1)
        total = np.zeros(changes.shape)
        for slot in range(residuals.shape[1]):
            z = (residuals[:, slot, None] - levels) / noise[:, None]
            logs = np.log(_density(z, points))
            total += (logs[:, 1:] - logs[:, :1]) * present[:, slot, None]
        design = self._design(rows, sessions)
        total = np.clip(total / design[:, None], -_NIGHT_BOUND, _NIGHT_BOUND)
        return total, sessions / design, variance / noise**2


def _spread(values: Floats) -> Floats:
    """Compute the standard deviation of a normal distribution of this median absolute deviation."""
    middle = np.nanmedian(values, axis=1)
    found: Floats = 1.4826 * np.nanmedian(np.abs(values - middle[:, None]), axis=1)
    return found


def _density(z: Floats, points: Floats) -> Floats:
    """Compute the noise density, not normalised, at `z` [series, n]; residuals [series, memory]."""
    exponents = z[:, :, None] - points[:, None, :]
    exponents *= exponents  # in place: these arrays are most of the time of a long history
    exponents *= -0.5 / _BANDWIDTH**2
    kernels = np.exp(exponents, out=exponents).sum(axis=2) / (_BANDWIDTH * np.sqrt(2 * np.pi))
    prior = _PRIOR_PEAK * (1 + z**2 / _PRIOR_DF) ** (-(_PRIOR_DF + 1) / 2)
    found: Floats = kernels + _PRIOR_WEIGHT * prior
    return found


class _Watch:
    """Judgement of a batch of series, night by night."""

    def __init__(self, table: _Table, histories: Sequence[History]) -> None:
        self.table = table
        self.signs = [1.0 if history.higher_is_better else -1.0 for history in histories]
        smallest = np.array([history.smallest for history in histories])
        self.sizes = np.log1p(smallest[:, None] * _SIZES)
        self.forecast = _Forecast(table, smallest / 25)
        self.lengths = self.forecast.present.any(2).sum(1)
        self.ratios = np.zeros((len(histories), WINDOW, 2 * len(_SIZES)))  # tonight's first
        self.worth = np.zeros((len(histories), WINDOW))
        self.next = np.zeros(len(histories), np.int64)  # the first night not taken in
        self.began = np.zeros(len(histories), np.int64)  # the first night at the present level
        self.found: list[list[Change]] = [[] for _ in histories]

    def run(self) -> list[tuple[Change, ...]]:
        """Judge all nights."""
        for night in range(int(self.lengths.max())):
            rows = np.flatnonzero(self.lengths > night)
            if night < MIN_NIGHTS:
                self._take_in(rows)
                continue
            lag = np.clip(night - self.began - MIN_NIGHTS, _SHORTEST, WINDOW)
            while (late := rows[(night - self.next >= lag)[rows]]).size:
                self._take_in(late)
            statistics = self._statistics(rows, night)
            age = (night - self.began[rows] - MIN_NIGHTS) / EARLY_NIGHTS
            limits = THRESHOLDS + EARLY_MARGIN * np.clip(1 - age, 0, 1)[:, None]
            for is_loss, statistic in zip((True, False), statistics, strict=True):
                margin = 0.0 if is_loss else GAIN_MARGIN
                for place in np.flatnonzero((statistic > limits + margin).any(1)):
                    if self.next[rows[place]] <= night:
                        began = night - int(statistic[place].argmax())
                        self._change(int(rows[place]), began, night, is_loss=is_loss)
        return [tuple(found) for found in self.found]

    def _take_in(self, rows: Ints) -> None:
        self.forecast.take_in(rows, self.next[rows])
        self.next[rows] += 1

    def _statistics(self, rows: Ints, night: int) -> tuple[Floats, Floats]:
        """Compute the evidence for a loss and a gain by nights since it began [series, window]."""
        sizes = np.maximum(self.sizes[rows], _SIZES_OF_NOISE * self.forecast.noise[rows, None])
        changes = np.concatenate([-sizes, sizes], axis=1)
        ratios, worth, variance = self.forecast.log_ratios(rows, night, changes)
        self.ratios[rows, 1:], self.worth[rows, 1:] = self.ratios[rows, :-1], self.worth[rows, :-1]
        self.ratios[rows, 0], self.worth[rows, 0] = ratios, worth
        certain = 1 / (1 + np.cumsum(self.worth[rows], axis=1) * variance[:, None])
        sums = np.cumsum(self.ratios[rows], axis=1) * certain[:, :, None]
        judged = np.arange(WINDOW) <= (night - self.next[rows])[:, None]
        losses, gains = (
            np.where(judged, np.log(np.exp(part).mean(axis=2)), -np.inf)
            for part in np.split(sums, 2, axis=2)
        )
        return losses, gains

    def _change(self, row: int, began: int, night: int, *, is_loss: bool) -> None:
        """Keep a change, and go on from the new level."""
        one = np.array([row])
        while self.next[row] < began:
            self._take_in(one)
        level = self.forecast.state[row, 0]
        jump = np.nanmean(self.table.logs[row, began : night + 1]) - level
        self.forecast.covariance[row, 0, 0] += max(_JUMP_SD, abs(jump)) ** 2
        for late in range(began, night + 1):
            self.forecast.take_in(one, np.array([late]), learn=False)
        self.next[row], self.began[row] = night + 1, began
        ratio = float(np.exp(self.signs[row] * (self.forecast.state[row, 0] - level)))
        nights = self.table.nights[row]
        self.found[row].append(Change(nights[began], nights[night], ratio, is_loss))
