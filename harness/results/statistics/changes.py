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
- Where a new device takes the place of all others, level and offset cannot be told apart: its first
  nights teach its level, and whatever else began on them is part of it.
- A change that began `w` nights ago has the statistic `log mean over sizes of
  exp(sum of log-likelihood ratios)`, reduced by the design effect of sessions that share a night
  (L. Kish, "Survey Sampling", 1965), by the uncertainty of the level, and by how much more sums of
  the series' nights have varied than those of independent ones. A night's ratio is bounded, so at
  least two nights have to agree.
- One device may change alone. That is a hypothesis of its own, by the nights of that device, with a
  higher threshold the more devices there are. Whichever tells a change, its devices are those for
  which it explains the nights best (`_Watch._scope`).
- Nights that go back by themselves, told or not, are spells of the series. A change that such
  spells may explain, by their number, length and depth, is told once it has outlasted them.
- The value may change with the temperature at a session's start: a state of the filter, so that
  hot sessions say nothing of the level until their effect is known.
- Nights after a change are a sequential test (A. Wald, "Sequential Analysis", 1947) of the new
  level against the old one. A change that it refutes was a spell.

The thresholds were tuned on other seeds than those that `benchmarks/change_detection.py` reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

_LEVEL = np.array([0])
"""Place of the level among the states of a forecast; a device's offset is at its number + 1."""
_SIZES = np.array([1, 1.4, 2, 2.8, 4, 6, 10, 16])
"""Sizes of changes that are looked for, in units of the smallest one."""
_SIZES_OF_NOISE = np.array([0, 0, 0, 0, 0, 2, 4, 8])
"""What they are at least, in units of the noise: else the greatest of a noisy series are as
unremarkable as its outliers."""
_NEVER = 1e9
THRESHOLDS = np.array([_NEVER, 5.9, 5.7, 6.3, 6.8, 7.3, *[7.8] * (WINDOW - 6)])
"""Of the statistic of a loss, by the nights since it began; one night is never enough."""
GAIN_MARGIN = 1.5
"""Added to them for a gain, of which nobody has to be told at once."""
_ALONE_MARGIN = 0.5
"""Added to them, with the logarithm of the number of devices, for a change of one device."""
_EXCLUDED = 1.5
"""Evidence that it takes to leave a device out of a change."""
_SHORTEST = 4
"""Window at a level that is new."""
_NIGHT_BOUND = 4.0
_DRIFT = 0.03
"""Standard deviation of the level's drift in a night, in units of the noise."""
_OFFSET_SD = 0.05
"""Of devices of one model, about their mean."""
_SWAPPED, _INTRODUCED = 2, 4
"""Nights of new devices only from which these have taken the place of the others; nights until they
are known, of which none can be told from a change of level."""
_HEAT_SD, _HEAT_UNIT, _MOST_HEAT = 0.05, 10.0, 3.0
"""Of the change with heat, by so many degrees; so many of these at most."""
_MOST_DECIMALS, _GOLDEN = 4, (np.sqrt(5) - 1) / 2
_EVEN_SPREAD = 1.4826 / 4  # `_spread` of values that lie evenly in a unit
"""Of readings in a coarse unit; whole multiples of it lie evenly in a unit, in any number."""
_JUMP_SD = 0.3
"""Of the level at a change, at least."""
_MEMORY = 150
"""Residuals of sessions from which noise is learned."""
_BANDWIDTH = 0.5
_WIDENING = np.sqrt(1 + _BANDWIDTH**2)
_STEP, _FARTHEST = 0.25, 16.0
_BINS = round(2 * _FARTHEST / _STEP) + 1
"""Of deviations in units of the noise, in which its density is estimated."""
_REACH = 8
_KERNEL = np.exp(-0.5 * (np.arange(-_REACH, _REACH + 1) * _STEP / _BANDWIDTH) ** 2)
_KERNEL /= _BANDWIDTH * np.sqrt(2 * np.pi)
_PRIOR_WEIGHT, _PRIOR_DF, _PRIOR_PEAK = 20.0, 6.0, 0.3827
_CLIP = 3.0
"""Bound of innovations in standard deviations."""
_NEW_START = 0.5
"""Part of the deviations of the first nights that is left where a new level begins among them."""
_KEPT = 0.99
"""Part of what was learned of a series' wandering that is left after a night."""
_LENGTHS = np.arange(1, WINDOW + 1)
_PRIOR_NIGHTS = 6.0 * _LENGTHS
"""Weight of what sums of so many nights are expected to vary."""
_SHARED_WANDERS = 2.5 * (1 - 0.7 ** (_LENGTHS - 1))
"""By how much more they do where the sessions of a night share all of their noise."""
_CHANCE = 0.12
"""Correlation of independent nights or sessions that chance explains."""
_FOLLOW, _UNREMARKABLE = 1 / 60, 1.9
"""Drift in a night of a level that wanders, and the variation of sums from which it does."""
_DOUBT_BOUND, _CONFIRMED, _REFUTED = 2.0, 6.0, -5.0
"""Of a night's log-likelihood ratio of a change against none, and of their sum."""
_REMARKABLE = 2.0
"""Evidence short of a threshold from which nights that go back by themselves are a spell."""
_USUAL, _PATIENCE = 1e-3, 3.0
"""Spells a night, as long and as deep as a change, from which it may be one of them; nights by
which a change has to outlast a spell, so that e times fewer last as long."""
_SUDDEN, _NO_NOISE = 0.08, 2.0
"""Change for which two nights are enough, or any if the noise is so near its floor; else three."""
_CALM, _SHARING = 1.5, 0.15
"""Taken off the threshold of a loss where sessions of a night share nothing, and are several; the
correlation at which nothing is taken off."""
_FEWEST = 5
"""Residuals from which the noise is estimated anew."""
_BATCH = 128
"""Series that are judged together."""
VISIBLE_IN = 3
"""Nights within which `SeriesJudgement.smallest_loss` would be told."""
_LOSSES = 1.1 ** np.arange(46)
"""Sizes that `SeriesJudgement.smallest_loss` can have, in units of `History.smallest`."""
_REPLAYED, _CERTAINTY = 60, 5 / 6
"""Nights under which losses are put, to see which are told; part that has to be."""


@dataclass(frozen=True, slots=True)
class History:
    """Sessions of one series, in the order in which they ran.

    Attributes:
        values: above 0, one for each session.
        nights: number of the night of each session, ascending; numbers may be left out.
        devices: the device of each session.
        higher_is_better: the direction of a gain.
        smallest: smallest change to look for, as a part of the value.
        heat: temperature at the start of each session in degrees Celsius; None where it is unknown,
            empty where heat changes nothing.
    """

    values: Sequence[float]
    nights: Sequence[int]
    devices: Sequence[str]
    higher_is_better: bool = True
    smallest: float = SMALLEST
    heat: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A change of level.

    Attributes:
        night: the first night at the new level.
        found: the night on which it became certain enough to tell.
        ratio: new level over old one, as seen when it was found.
        is_loss: whether it is for the worse.
        refuted: the night on which the series was seen to be at its old level after all; else None.
            Nothing else of a change depends on later nights.
        devices: those that changed, where others did not; empty for all.
    """

    night: int
    found: int
    ratio: float
    is_loss: bool
    refuted: int | None = None
    devices: tuple[str, ...] = ()

    @property
    def scope(self) -> str:
        """The devices in words."""
        return scope_of(self.devices)

    def concerns(self, devices: Sequence[str]) -> bool:
        """Return whether any of these devices changed; none stand for all."""
        return not (devices and self.devices) or not set(devices).isdisjoint(self.devices)


def scope_of(devices: Sequence[str]) -> str:
    """Name the devices that changed where others did not: `P2, P3 alone`; empty for all."""
    return f"{', '.join(devices)} alone" if devices else ""


@dataclass(frozen=True, slots=True)
class SeriesJudgement:
    """Changes of one series, and which loss it would show.

    Attributes:
        smallest_loss: as a part of the value: of such losses that began now, five of six would be
            told within `VISIBLE_IN` nights, if these had as many sessions as those before. None in
            a series that is too short to be judged.
        unit: in which its readings are, as a part of the value; 0 if that is fine.
        wandering: by how much more the mean of 1, 2 and more nights varies than that of independent
            ones, by their number; at least 1.
    """

    changes: tuple[Change, ...] = ()
    smallest_loss: float | None = None
    unit: float = 0.0
    wandering: tuple[float, ...] = (1.0,)


def detect(history: History) -> tuple[Change, ...]:
    """Find the changes of one series, judging each night by the past alone."""
    return judge_all([history])[0].changes


def judge_all(histories: Sequence[History]) -> tuple[SeriesJudgement, ...]:
    """Judge many series at once, which is far faster than one by one.

    Raises:
        ValueError: a value is not above 0, nights do not ascend, or lengths differ.
    """
    judgements = [SeriesJudgement()] * len(histories)
    whole = [number for number, history in enumerate(histories) if len(history.values)]
    whole.sort(key=lambda number: len(set(histories[number].nights)))
    for first in range(0, len(whole), _BATCH):
        numbers = whole[first : first + _BATCH]
        several = [histories[number] for number in numbers]
        judged = _Watch(_Table.of(several), several).run()
        for number, judgement in zip(numbers, judged, strict=True):
            judgements[number] = judgement
    return tuple(judgements)


@dataclass(slots=True)
class _Table:
    """Logarithms of a batch's values by series, night and session; NaN where there is none.

    Losses go down for every metric. Heat is above that of the first nights, in units of 10 degrees.
    Readings in coarse units are spread evenly over what is rounded to them; `units` has these, as
    parts of the values.
    """

    logs: Floats
    devices: Ints
    heat: Floats
    units: Floats
    nights: list[list[int]]
    names: list[list[str]]

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """True for places with a session."""
        return ~np.isnan(self.logs)

    @classmethod
    def of(cls, histories: Sequence[History]) -> "_Table":
        placed = [_place(history) for history in histories]
        most = max(int(slots.max()) for slots, _, _ in placed) + 1
        longest = max(len(nights) for _, _, nights in placed)
        logs = np.full((len(histories), longest, most), np.nan)
        devices, heat = np.zeros(logs.shape, np.int64), np.zeros(logs.shape)
        units = np.zeros(len(histories))
        all_names = [list(dict.fromkeys(history.devices)) for history in histories]
        for series, (history, (slots, rows, _)) in enumerate(zip(histories, placed, strict=True)):
            names = {name: number for number, name in enumerate(all_names[series])}
            sign = 1.0 if history.higher_is_better else -1.0
            values = np.asarray(history.values, float)
            unit = _resolution(values[rows < MIN_NIGHTS])
            units[series] = unit / np.median(values)
            places = np.arange(1, len(values) + 1) * _GOLDEN % 1 - 0.5
            values = np.maximum(values + unit * places, values / 2)
            logs[series, rows, slots] = sign * np.log(values)
            devices[series, rows, slots] = [names[name] for name in history.devices]
            if len(history.heat):
                heat[series, rows, slots] = _relative_heat(history, rows)
        return cls(logs, devices, heat, units, [nights for _, _, nights in placed], all_names)


def _resolution(values: Floats) -> float:
    """Return the decimal unit of which all values are whole multiples; 0 if it is too fine."""
    for decimals in range(_MOST_DECIMALS):
        tens = values * 10**decimals
        if np.allclose(tens, np.rint(tens), rtol=0, atol=1e-6):
            return 10.0**-decimals
    return 0.0


def _relative_heat(history: History, rows: Ints) -> Floats:
    celsius = np.array(history.heat, float)
    early = celsius[(rows < MIN_NIGHTS) & ~np.isnan(celsius)]
    usual = float(np.median(early)) if early.size else np.nan
    heat: Floats = np.clip(np.nan_to_num((celsius - usual) / _HEAT_UNIT), -_MOST_HEAT, _MOST_HEAT)
    return heat


def _place(history: History) -> tuple[Ints, Ints, list[int]]:
    """Return slot and row of each session, its place in its night; and the night of each row."""
    lengths = {len(history.values), len(history.nights), len(history.devices)}
    if len(lengths | ({len(history.heat)} - {0})) > 1:
        raise ValueError("values, nights, devices and heat are not of one length")
    values, nights = np.asarray(history.values, float), np.asarray(history.nights)
    if not ((values > 0) & (values < np.inf)).all():
        raise ValueError("only finite values above 0 can be judged")
    steps = np.diff(nights)
    if (steps < 0).any():
        raise ValueError("nights do not ascend")
    starts = np.flatnonzero(np.concatenate([[True], steps > 0]))
    rows = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(nights)))
    return np.arange(len(nights)) - starts[rows], rows, nights[starts].tolist()


class _Forecast:
    """Level, device offsets and noise of each series of a batch, from the nights taken in."""

    def __init__(self, table: _Table, floors: Floats) -> None:
        self.logs, self.devices, self.heat = table.logs, table.devices, table.heat
        self.units = table.units
        self.present = table.present
        series, _, _ = table.logs.shape
        states = int(table.devices.max()) + 3  # the level, an offset of each device, of heat
        early = table.logs[:, :MIN_NIGHTS]
        self.floors = floors
        self.first, level = _find_start(early)  # nights before it belong to another level
        from_there = np.arange(early.shape[1]) >= self.first[:, None]
        about = early - np.where(from_there, level[:, 1:], level[:, :1])[:, :, None]
        about = about.reshape(series, -1)
        self.noise = np.maximum(_spread(about), floors)
        self.noise *= 1 + 3 / np.count_nonzero(~np.isnan(about), axis=1)
        # The first night of a device says where its level is, unless it is an outlier.
        alone = table.devices[:, :MIN_NIGHTS].max(axis=(1, 2)) == 0
        bound = np.where(alone, _CLIP * self.noise, np.inf)[:, None, None]
        bound = bound + _JUMP_SD * np.abs(table.heat[:, :MIN_NIGHTS])
        middle = level[:, 1, None, None]
        early = np.clip(early, middle - bound, middle + bound)
        self.logs = np.concatenate([early, table.logs[:, MIN_NIGHTS:]], axis=1)
        self.state = np.zeros((series, states))
        self.state[:, 0] = level[:, 1]
        self.covariance = np.zeros((series, states, states))
        diagonal = np.arange(states)
        self.covariance[:, diagonal, diagonal] = _OFFSET_SD**2
        # Of a later device nothing is known: units can be as far apart as levels are.
        for place in range(1, states - 1):
            is_early = (self.present & (table.devices == place - 1))[:, :MIN_NIGHTS].any((1, 2))
            self.covariance[~is_early, place, place] = _JUMP_SD**2
        self.covariance[:, -1, -1] = _HEAT_SD**2
        self.covariance[:, 0, 0] = np.where(alone, 0, _OFFSET_SD**2) + self.noise**2
        self.residuals = np.full((series, _MEMORY), np.nan)
        self.count = np.zeros(series, np.int64)
        # Products of sessions of one night, and squares: their ratio is the correlation.
        self.shared = np.full(series, 1.25)
        self.squares = np.full(series, 5.0)
        # Scores and information of the newest nights; by the length of sums over them, the squares
        # that these had, in units of those of independent nights, and how many there were.
        self.scores = np.zeros((series, 2, WINDOW))
        self.wandered = np.zeros((series, 2, WINDOW))
        taught = self.present[:, :MIN_NIGHTS]
        self.sessions = taught.sum((1, 2)) / taught.any(2).sum(1)

    def compare(self, rows: Ints, nights: Ints) -> tuple[Floats, Floats, Floats]:
        """Return residuals of a night of each row, their number, and their forecast's variance."""
        present, devices = self.present[rows, nights], self.devices[rows, nights] + 1
        state = self.state[rows]
        heat = self.heat[rows, nights]
        forecast = state[:, :1] + np.take_along_axis(state, devices, 1) + heat * state[:, -1:]
        residuals = np.where(present, self.logs[rows, nights] - forecast, 0.0)
        sessions = present.sum(1).astype(float)
        weights = np.zeros_like(state)
        weights[:, 0], weights[:, -1] = 1, heat.sum(1) / sessions
        for slot in range(present.shape[1]):
            weights[np.arange(len(rows)), devices[:, slot]] += present[:, slot] / sessions
        variance = np.einsum("si,sij,sj->s", weights, self.covariance[rows], weights)
        return residuals, sessions, variance

    def take_in(self, rows: Ints, nights: Ints, *, learn: bool = True) -> None:
        """Update level, offsets and noise by a night of each row."""
        wanders = np.maximum(self.correlation(rows)[:, -1] - _UNREMARKABLE, 0)
        self.covariance[rows, 0, 0] += self.noise[rows] ** 2 * (_DRIFT**2 + _FOLLOW * wanders)
        residuals, sessions, variance = self.compare(rows, nights)
        noise = self.noise[rows]
        design = self.design(rows, sessions)
        each = np.arange(len(rows))
        for slot in range(residuals.shape[1]):
            present, device = self.present[rows, nights, slot], self.devices[rows, nights, slot] + 1
            covariance, state = self.covariance[rows], self.state[rows]
            heat = self.heat[rows, nights, slot]
            gain = covariance[:, 0] + covariance[each, device] + heat[:, None] * covariance[:, -1]
            total = gain[:, 0] + gain[each, device] + heat * gain[:, -1] + noise**2 * design
            level = state[:, 0] + state[each, device] + heat * state[:, -1]
            error = np.nan_to_num(self.logs[rows, nights, slot]) - level
            bound = _CLIP * np.sqrt(total)
            error = np.clip(error, -bound, bound)
            step = gain / total[:, None] * present[:, None]
            self.state[rows] = state + step * error[:, None]
            self.covariance[rows] = covariance - step[:, :, None] * gain[:, None, :]
        if learn:
            self._learn(rows, nights, residuals / np.sqrt(1 + variance / noise**2)[:, None])
            bounded = np.clip(residuals / noise[:, None], -_CLIP, _CLIP).sum(1) / design
            self._follow(rows, bounded, sessions / design, variance / noise**2)

    def _follow(self, rows: Ints, score: Floats, worth: Floats, variance: Floats) -> None:
        """Learn how far sums of nights wander."""
        scores = self.scores[rows]
        scores[:, :, 1:] = scores[:, :, :-1]
        scores[:, 0, 0], scores[:, 1, 0] = score, worth
        self.scores[rows] = scores
        sums = np.cumsum(scores, axis=2)
        variation = sums[:, 1] * (1 + sums[:, 1] * variance[:, None])
        full = scores[:, 1] > 0  # so many nights have been
        squares = np.stack([np.where(full, sums[:, 0] ** 2 / variation, 0), full], axis=1)
        self.wandered[rows] = _KEPT * self.wandered[rows] + squares

    def correlation(self, rows: Ints) -> Floats:
        """Return by how much sums of nights vary more than of independent ones [series, window]."""
        shared = np.clip(self.shared[rows] / self.squares[rows] - _CHANCE, 0, 1)
        variation = 1 + (shared * self.sessions[rows])[:, None] * _SHARED_WANDERS
        squares, nights = self.wandered[rows, 0], self.wandered[rows, 1]
        ratio = (squares + _PRIOR_NIGHTS * variation) / (nights + _PRIOR_NIGHTS)
        factor: Floats = np.maximum.accumulate(np.maximum(ratio - _CHANCE, 1), axis=1)
        return factor

    def calm(self, rows: Ints) -> Floats:
        """Return how surely the sessions of a night share nothing, from 0 to 1."""
        shared = self.shared[rows] / self.squares[rows]
        calm: Floats = np.clip(1 - shared / _SHARING, 0, 1) * np.minimum(self.sessions[rows] - 1, 1)
        return calm

    def design(self, rows: Ints, sessions: Floats) -> Floats:
        """Return the number of sessions of a night that are worth one which shares nothing."""
        correlation = np.clip(self.shared[rows] / self.squares[rows], 0, 1)
        design: Floats = 1 + (sessions - 1) * correlation
        return design

    def worth(self, rows: Ints, sessions: Floats) -> Floats:
        """Return the number of independent sessions that those of a night are worth."""
        return sessions / self.design(rows, sessions)

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
        ready = rows[self.count[rows] >= _FEWEST]
        if len(ready):
            spread = np.maximum(_spread(self.residuals[ready]), self.floors[ready])
            self.noise[ready] = spread * (1 + 2 / np.minimum(self.count[ready], _MEMORY))

    def log_ratios(self, rows: Ints, residuals: Floats, changes: Floats) -> Floats:
        """Compute log-likelihood ratios of each change of level against none.

        Args:
            residuals: [rows, sessions]; NaN where there is none.
            changes: [rows, changes].

        Returns:
            them [rows, sessions, changes]; 0 without a session.
        """
        greatest = np.abs(changes).max(1, keepdims=True)  # what is farther off is at least that
        noise, missing = self.noise[rows], np.isnan(residuals)
        residuals = np.clip(np.nan_to_num(residuals), -greatest, greatest)
        kernels = _kernel_estimate(self.residuals[rows] / noise[:, None] / _WIDENING)
        levels = np.concatenate([np.zeros((len(rows), 1)), changes], axis=1)
        z = (residuals[:, :, None] - levels[:, None]) / noise[:, None, None]
        logs = _log_density(z.reshape(len(rows), -1), kernels).reshape(z.shape)
        ratios: Floats = np.where(missing[:, :, None], 0, logs[:, :, 1:] - logs[:, :, :1])
        return ratios

    def coarseness(self, rows: Ints) -> Floats:
        """Return the variance of a level's distance from its mean reading, in units of the noise's.

        The first term of its Fourier series: noise of more than half a unit hides the unit.
        """
        unit, noise = np.maximum(self.units[rows], 1e-9), self.noise[rows]
        own = np.maximum(noise**2 - (_EVEN_SPREAD * unit) ** 2, 0)
        coarse: Floats = (unit / np.pi * np.exp(-2 * np.pi**2 * own / unit**2) / noise) ** 2
        return coarse

    def variance_of(self, rows: Ints, devices: Ints, heat: Floats) -> Floats:
        """Return the variance of the forecasts of a device of each row, in units of the noise's."""
        covariance, places = self.covariance[rows], devices + 1
        each = np.arange(len(rows))
        of_offset = 2 * covariance[each, 0, places] + covariance[each, places, places]
        of_heat = 2 * covariance[each, 0, -1] + 2 * covariance[each, places, -1]
        of_heat = heat * (of_heat + heat * covariance[each, -1, -1])
        variance: Floats = (covariance[:, 0, 0] + of_offset + of_heat) / self.noise[rows] ** 2
        return variance


def _find_start(early: Floats) -> tuple[Ints, Floats]:
    """Find the first night of the level that the first nights end at, and both levels."""
    present = ~np.isnan(early)
    nights = np.nansum(early, axis=2) / np.maximum(present.sum(2), 1)
    nights[~present.any(2)] = np.nan
    count = nights.shape[1]
    best = np.nanmedian(nights, axis=1)
    nights = np.where(np.isnan(nights), best[:, None], nights)  # of series too short to be judged
    levels = np.stack([best, best], axis=1)
    first = np.zeros(len(nights), np.int64)
    least = _NEW_START * np.sum(np.abs(nights - best[:, None]), axis=1)
    for start in range(1, count - 1):
        both = [np.median(p, axis=1) for p in (nights[:, :start], nights[:, start:])]
        level = np.where(np.arange(count) < start, both[0][:, None], both[1][:, None])
        cost = np.sum(np.abs(nights - level), axis=1)
        better = cost < least
        least, first = np.where(better, cost, least), np.where(better, start, first)
        levels = np.where(better[:, None], np.stack(both, axis=1), levels)
    return first, levels


def _median(values: Floats) -> Floats:
    """Compute the median of each row, NaN left out; far faster than `numpy.nanmedian`."""
    in_order = np.sort(values, axis=1)  # NaN last
    count = np.count_nonzero(~np.isnan(values), axis=1)
    middle = np.stack([np.maximum(count - 1, 0) // 2, count // 2], axis=1)
    median: Floats = np.take_along_axis(in_order, middle, 1).mean(1)
    return median


def _spread(values: Floats) -> Floats:
    """Compute the standard deviation of a normal distribution of this median absolute deviation."""
    spread: Floats = 1.4826 * _median(np.abs(values - _median(values)[:, None]))
    return spread


def _kernel_estimate(points: Floats) -> Floats:
    """Estimate densities, not normalised, in bins, of points [series, n] in units of noise."""
    shape = (len(points), _BINS + 2 * _REACH)
    near = np.abs(points) <= _FARTHEST  # what is farther off, or NaN, is without weight
    rows, _ = np.nonzero(near)
    bins = np.rint((points[near] + _FARTHEST) / _STEP).astype(np.int64) + _REACH
    counts = np.bincount(rows * shape[1] + bins, minlength=shape[0] * shape[1])
    counts = counts.reshape(shape).astype(float)
    density = np.zeros((len(points), _BINS))
    for place, weight in enumerate(_KERNEL):
        density += weight * counts[:, place : place + _BINS]
    return density


def _log_density(z: Floats, kernels: Floats) -> Floats:
    """Compute log densities of noise at `z` [series, n], in units of noise."""
    places = np.clip((z + _FARTHEST) / _STEP, 0, _BINS - 1.001)
    below = places.astype(np.int64)
    near = np.take_along_axis(kernels, below, 1)
    near += (np.take_along_axis(kernels, below + 1, 1) - near) * (places - below)
    prior = _PRIOR_PEAK * (1 + z**2 / _PRIOR_DF) ** (-(_PRIOR_DF + 1) / 2)
    density: Floats = np.log(near + _PRIOR_WEIGHT * prior)
    return density


@dataclass(slots=True)
class _Doubt:
    """A change that later nights may refute.

    Attributes:
        places: of the states that changed: 0, the level, or offsets of devices.
        shift: by how much.
        state, covariance: of the forecast before the change.
        evidence: sum of the log-likelihood ratios of later nights, for the change.
        most: the greatest that it was.
        lasted: nights from the first one to that.
    """

    began: int
    places: Ints
    shift: float
    state: Floats
    covariance: Floats
    lasted: int
    evidence: float = 0.0
    most: float = 0.0


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
        self.errors = np.full(table.logs.shape, np.nan)  # of forecasts, but where levels changed
        self.unknown = np.zeros((len(histories), WINDOW))  # worth times the forecast's variance
        self.several = np.array([len(names) > 1 for names in table.names])
        most = max(map(len, table.names))
        self.alone = np.zeros((*self.ratios.shape[:2], most, self.ratios.shape[2]))
        self.alone_worth = np.zeros(self.alone.shape[:3])
        self.next = np.zeros(len(histories), np.int64)  # the first night not taken in
        self.began = np.zeros(len(histories), np.int64)  # the first night at the present level
        self.found: list[list[Change]] = [[] for _ in histories]
        self.doubts: dict[int, _Doubt] = {}
        self.new = np.zeros(len(histories), np.int64)  # latest nights of devices that are new
        self.last_night = np.full((len(histories), most), -1)
        early = table.devices[:, :MIN_NIGHTS, :, None] == np.arange(most)
        early &= table.present[:, :MIN_NIGHTS, :, None]
        self.nights_of = np.where(early.any((1, 2)), _INTRODUCED, 0)
        # Of spells that went back by themselves: how many nights they lasted, how deep they were,
        # and the night after. Of what may become one: evidence, nights, depth.
        self.spells: list[list[tuple[int, float, int]]] = [[] for _ in histories]
        self.spell: dict[int, tuple[float, int, float]] = {}
        self.last: list[tuple[int, float] | None] = [None] * len(histories)  # change: night, size

    def run(self) -> list[SeriesJudgement]:
        """Judge all nights."""
        for night in range(int(self.lengths.max())):
            rows = np.flatnonzero(self.lengths > night)
            if night == MIN_NIGHTS:
                for row in rows.tolist():
                    taught = np.arange(self.forecast.first[row], MIN_NIGHTS)
                    state = self.forecast.state[row]
                    self.errors[row, taught] = self._deviations(row, taught, state)
            if night < MIN_NIGHTS:
                rows = rows[self.forecast.first[rows] <= night]
                self.next[rows] = night
                self._take_in(rows)
                continue
            lag = np.clip((night - self.began) // 3, _SHORTEST, WINDOW)
            while (late := rows[(night - self.next >= lag)[rows]]).size:
                self._take_in(late)
            self._introduce(rows, night)
            for row in list(self.doubts):
                if self.lengths[row] > night:
                    self._doubt(row, night)
            statistics = self._statistics(rows, night)
            calm = _CALM * self.forecast.calm(rows)[:, None]
            remarkable = np.zeros(statistics[0].shape, bool)
            for is_loss, statistic in zip((True, False), statistics, strict=True):
                thresholds = THRESHOLDS + (0 if is_loss else GAIN_MARGIN)
                is_remarkable = statistic > thresholds - _REMARKABLE
                remarkable |= is_remarkable
                for place in np.flatnonzero(is_remarkable.any(1)):
                    row = int(rows[place])
                    if self.next[row] <= night:
                        excess = statistic[place] - thresholds + calm[place] * is_loss
                        self._weigh_change(row, night, statistic[place], excess, is_loss=is_loss)
            for row in self.spell.keys() & set(rows[~remarkable.any(1)].tolist()):
                self.spells[row].append((*self.spell.pop(row)[1:], night))  # it has gone back
        return [
            SeriesJudgement(
                tuple(changes),
                float(loss) if nights >= MIN_NIGHTS else None,
                float(unit),
                tuple(wandering),
            )
            for changes, loss, nights, unit, wandering in zip(
                self.found,
                self._smallest_losses(),
                self.lengths,
                self.table.units,
                self.forecast.correlation(np.arange(len(self.lengths))).tolist(),
                strict=True,
            )
        ]

    def _weigh_change(
        self, row: int, night: int, statistic: Floats, excess: Floats, *, is_loss: bool
    ) -> None:
        """Tell a change that is none of the series' spells, or follow what may become one."""
        nights = int(statistic.argmax())
        places = self._scope(row, nights, is_loss=is_loss)
        since = np.arange(night - nights, night + 1)
        away = self._deviations(row, since, self.forecast.state[row])
        away = away[self._is_of(row, since, places)]
        size = abs(float(away.mean())) if away.size else 0.0
        least = int(self._least_nights(np.array([row]), np.array([size]))[0])
        if excess[least - 1 :].max() > 0 and not self._is_usual(row, night, nights + 1, size):
            self.spell.pop(row, None)
            self._change(row, night - nights, night, places, is_loss=is_loss)
        else:
            most = float(excess.max())
            self.spell[row] = max(self.spell.get(row, (-_NEVER, 0, 0.0)), (most, nights + 1, size))

    def _is_usual(self, row: int, night: int, nights: int, size: float) -> bool:
        """Return whether the series has often had spells as long and as deep as a change."""
        unit = self.forecast.noise[row] / np.sqrt(nights * self.forecast.sessions[row])
        spells = 0.0
        for lasted, depth, ended in self.spells[row]:
            longer = max(nights - lasted, 0) / _PATIENCE
            deeper = max(size - depth, 0) / (unit / 2 + depth / 16)
            spells += _KEPT ** (night - ended) * np.exp(-longer - deeper)
        return bool(spells > _USUAL * (1 - _KEPT**night) / (1 - _KEPT))

    def _introduce(self, rows: Ints, night: int) -> None:
        """Take in nights on which devices measure that have just taken the place of all others."""
        present, devices = self.table.present[rows, night], self.table.devices[rows, night]
        known = np.take_along_axis(self.nights_of[rows], devices, 1) >= _INTRODUCED
        is_new = present.any(1) & ~(known & present).any(1)
        self.new[rows] = np.where(is_new, self.new[rows] + 1, 0)
        for slot in range(present.shape[1]):
            here = np.flatnonzero(present[:, slot])
            self.last_night[rows[here], devices[here, slot]] = night
        self.nights_of[rows] += self.last_night[rows] == night
        for row in rows[self.new[rows] >= _SWAPPED]:
            self.began[row] = night
            while self.next[row] <= night:
                self._take_in(np.array([row]))

    def _take_in(self, rows: Ints) -> None:
        self.forecast.take_in(rows, self.next[rows])
        self.next[rows] += 1

    def _statistics(self, rows: Ints, night: int) -> tuple[Floats, Floats]:
        """Compute the evidence for a loss and a gain by nights since it began [series, window]."""
        sizes = np.maximum(self.sizes[rows], _SIZES_OF_NOISE * self.forecast.noise[rows, None])
        changes = np.concatenate([-sizes, sizes], axis=1)
        residuals, sessions, variance = self.forecast.compare(rows, np.full(len(rows), night))
        variance /= self.forecast.noise[rows] ** 2
        residuals = np.where(self.table.present[rows, night], residuals, np.nan)
        self.errors[rows, night] = residuals
        ratios = self.forecast.log_ratios(rows, residuals, changes)
        worth = self.forecast.worth(rows, sessions)
        self.ratios[rows, 1:], self.worth[rows, 1:] = self.ratios[rows, :-1], self.worth[rows, :-1]
        self.ratios[rows, 0] = ratios.sum(1) * (worth / sessions)[:, None]
        self.worth[rows, 0] = worth
        self.unknown[rows, 1:] = self.unknown[rows, :-1]
        self.unknown[rows, 0] = worth * (variance + self.forecast.coarseness(rows))
        unknown = np.cumsum(self.unknown[rows], axis=1)
        zero = np.zeros(len(rows))
        statistic = self._weigh(rows, night, self.ratios[rows], unknown, zero)
        several = self.several[rows]
        if several.any():
            alone = self._statistics_alone(rows[several], night, ratios[several])
            statistic[:, several] = np.maximum(statistic[:, several], alone)
        return statistic[0], statistic[1]

    def _weigh(
        self, rows: Ints, night: int, ratios: Floats, unknown: Floats, margin: Floats
    ) -> Floats:
        """Sum up the ratios of nights: the evidence for a loss and a gain [2, series, window].

        Args:
            ratios: [series, window, change], tonight's first.
            unknown: variance of the forecast, in units of the noise's, times the independent
                sessions of so many nights.
            margin: that is taken off the evidence; two nights have to be enough nevertheless.
        """
        bound = (_NIGHT_BOUND + margin / 2)[:, None]
        certain = 1 / (1 + unknown)
        certain /= self.forecast.correlation(rows)
        by_night = np.ascontiguousarray(ratios.swapaxes(0, 1))  # twice as fast
        sums = np.empty(by_night.shape)
        for w in range(WINDOW):
            part = by_night[: w + 1] * certain[:, w, None]
            np.clip(part, -bound, bound, out=part).sum(axis=0, out=sums[w])
        judged = np.arange(WINDOW) <= (night - self.next[rows])[:, None]
        parts = np.stack(np.split(sums, 2, axis=2))
        evidence = np.log(np.exp(parts).mean(axis=3)).swapaxes(1, 2) - margin[:, None]
        weighed: Floats = np.where(judged, evidence, -np.inf)
        return weighed

    def _statistics_alone(self, rows: Ints, night: int, ratios: Floats) -> Floats:
        """Compute the evidence for a change of one device of tonight, the greatest of them all.

        Args:
            ratios: of tonight's sessions [series, slot, change].
        """
        for store in (self.alone, self.alone_worth):
            store[rows, 1:] = store[rows, :-1]
            store[rows, 0] = 0
        present, devices = self.table.present[rows, night], self.table.devices[rows, night]
        for slot in range(ratios.shape[1]):
            self.alone[rows, 0, devices[:, slot]] += ratios[:, slot]
            self.alone_worth[rows, 0, devices[:, slot]] += present[:, slot]
        sessions = self.alone_worth[rows, 0]
        design = np.stack([self.forecast.worth(rows, one) for one in sessions.T], axis=1)
        self.alone[rows, 0] *= (design / np.maximum(sessions, 1))[:, :, None]
        self.alone_worth[rows, 0] = design
        number = (self.alone_worth[rows] > 0).any(1).sum(1)
        margin = _ALONE_MARGIN + np.log(number)
        most = np.full((2, len(rows), WINDOW), -np.inf)
        for slot in range(ratios.shape[1]):
            here = np.flatnonzero(present[:, slot])
            some, device = rows[here], devices[here, slot]
            variance = self.forecast.variance_of(some, device, self.table.heat[some, night, slot])
            unknown = np.cumsum(self.alone_worth[some, :, device], axis=1) * variance[:, None]
            evidence = self._weigh(some, night, self.alone[some, :, device], unknown, margin[here])
            most[:, here] = np.maximum(most[:, here], evidence)
        return most

    def _scope(self, row: int, nights: int, *, is_loss: bool) -> Ints:
        """Return the places of the states that a change is of, as `_Doubt` has them.

        A device is left out if nights since are against the change there. One that alone has
        measured since, where several did before, says nothing of the others.

        Args:
            nights: before tonight, on which the change began.
        """
        if not self.several[row]:
            return _LEVEL
        worth = self.alone_worth[row, : nights + 1].sum(0)
        measured = np.flatnonzero(worth)
        rows = np.full(len(measured), row)
        certain = 1 / (
            1 + worth[measured] * self.forecast.variance_of(rows, measured, np.zeros(len(rows)))
        )
        sums = self.alone[row, : nights + 1][:, measured].sum(0) * certain[:, None]
        sums = np.split(sums, 2, axis=1)[0 if is_loss else 1]
        against = np.where(sums < 0, _EXCLUDED, 0).sum(0)
        apart = np.maximum(sums, 0).sum(0) - against
        size = int(apart.argmax())
        if apart[size] > sums.sum(0).max():
            return measured[sums[:, size] > 0] + 1
        before = np.flatnonzero(self.alone_worth[row, nights + 1 :].sum(0))
        is_one = len(measured) == 1 and len(np.setdiff1d(before, measured)) > 0
        return measured + 1 if is_one else _LEVEL

    def _smallest_losses(self) -> Floats:
        """Find the smallest loss of each series that would be told in time.

        It is put under all nights in a row among the newest ones, as they were forecast.
        """
        forecast, rows = self.forecast, np.arange(len(self.lengths))
        newest = self.lengths[:, None] - _REPLAYED + np.arange(_REPLAYED)
        errors = self.errors[rows[:, None], np.maximum(newest, 0)]
        errors[newest < 0] = np.nan
        known = ~np.isnan(errors).all(2)
        windows = known[:, :-2] & known[:, 1:-1] & known[:, 2:]
        sessions = np.count_nonzero(~np.isnan(errors), axis=2)
        design = np.maximum(forecast.design(rows[:, None], sessions), 1)
        variance = forecast.compare(rows, self.lengths - 1)[2] / forecast.noise**2
        variance = (variance + forecast.coarseness(rows))[:, None]
        sizes = np.maximum(self.sizes, _SIZES_OF_NOISE * forecast.noise[:, None])
        calm = _CALM * forecast.calm(rows)[:, None]
        smallest = np.full(len(rows), np.inf)
        for loss in self.sizes[:, 0] * _LOSSES[:, None]:
            lost = errors.reshape(len(rows), -1) - loss[:, None]
            ratios = forecast.log_ratios(rows, lost, -sizes).reshape(*errors.shape, -1).sum(2)
            ratios /= design[:, :, None]
            told = np.zeros(windows.shape, bool)
            for nights in range(2, VISIBLE_IN + 1):
                ends = [np.s_[:, k : k + windows.shape[1]] for k in range(nights)]
                unknown = sum((sessions / design)[end] for end in ends) * variance
                certain = 1 / (1 + unknown) / forecast.correlation(rows)[:, nights - 1 : nights]
                parts = [ratios[end] * certain[:, :, None] for end in ends]
                sums = sum(np.clip(part, -_NIGHT_BOUND, _NIGHT_BOUND) for part in parts)
                evident = np.log(np.exp(sums).mean(2)) > THRESHOLDS[nights - 1] - calm
                told |= evident & (self._least_nights(rows, loss) <= nights)[:, None]
            visible = (told & windows).sum(1) >= _CERTAINTY * np.maximum(windows.sum(1), 1)
            for row in np.flatnonzero(visible & np.isinf(smallest)).tolist():
                if not self._is_usual(row, int(self.lengths[row]), VISIBLE_IN, loss[row]):
                    smallest[row] = loss[row]
            if np.isfinite(smallest).all():
                break
        losses: Floats = -np.expm1(-np.minimum(smallest, loss))
        return losses

    def _least_nights(self, rows: Ints, sizes: Floats) -> Ints:
        """Return how many nights it takes to tell a change of a size."""
        no_noise = self.forecast.noise[rows] <= _NO_NOISE * self.forecast.floors[rows]
        least: Ints = np.where((sizes >= _SUDDEN) | no_noise, 2, 3)
        return least

    def _change(self, row: int, began: int, night: int, places: Ints, *, is_loss: bool) -> None:
        """Keep a change, and go on from the new level, or the new offsets of its devices."""
        one = np.array([row])
        while self.next[row] < began:
            self._take_in(one)
        forecast = self.forecast
        state, covariance = forecast.state[row].copy(), forecast.covariance[row].copy()
        nights = np.arange(began, night + 1)
        away = self._deviations(row, nights, state)
        of_scope = self._is_of(row, nights, places)
        jump = float(away[of_scope].mean()) if of_scope.any() else 0.0
        forecast.covariance[row, places, places] += max(_JUMP_SD, abs(jump)) ** 2
        for late in nights:
            forecast.take_in(one, np.array([late]), learn=False)
        self.errors[row, nights] = np.nan
        self.next[row], self.began[row] = night + 1, began
        shift = float((forecast.state[row, places] - state[places]).mean())
        if (last := self.last[row]) is not None:
            lasted = began - last[0]
            if lasted <= WINDOW and shift * last[1] < 0 and abs(shift) > abs(last[1]) / 2:
                self.spells[row].append((lasted, abs(last[1]), night))
        self.last[row] = began, shift
        self.doubts[row] = _Doubt(began, places, shift, state, covariance, night + 1 - began)
        numbers, names = self.table.nights[row], self.table.names[row]
        ratio = float(np.exp(self.signs[row] * shift))
        devices = tuple(names[place - 1] for place in places if place)
        self.found[row].append(
            Change(numbers[began], numbers[night], ratio, is_loss, devices=devices)
        )

    def _deviations(self, row: int, nights: Ints, state: Floats) -> Floats:
        """Return the deviations of nights from a forecast [night, slot]; NaN without a session."""
        levels = state[0] + state[self.table.devices[row, nights] + 1]
        levels = levels + self.table.heat[row, nights] * state[-1]
        deviations: Floats = self.table.logs[row, nights] - levels
        return deviations

    def _is_of(self, row: int, nights: Ints, places: Ints) -> npt.NDArray[np.bool_]:
        """Return which sessions are of the devices that changed [night, slot]."""
        of_devices = np.isin(self.table.devices[row, nights] + 1, places) | (places[0] == 0)
        present: npt.NDArray[np.bool_] = self.table.present[row, nights] & of_devices
        return present

    def _doubt(self, row: int, night: int) -> None:
        """Weigh whether a change has come back, and go on from the old level if so."""
        doubt, forecast, one = self.doubts[row], self.forecast, np.array([row])
        nights = np.array([night])
        of_scope = self._is_of(row, nights, doubt.places)
        if not of_scope.any():
            return
        state = forecast.state[row].copy()
        state[doubt.places] = doubt.state[doubt.places]
        away = float(self._deviations(row, nights, state)[of_scope].mean())
        ratio = doubt.shift * (away - doubt.shift / 2)
        worth = forecast.worth(one, np.array([float(of_scope.sum())]))[0]
        ratio /= forecast.noise[row] ** 2 / worth
        ratio /= forecast.correlation(one)[0, 2]
        doubt.evidence += float(np.clip(ratio, -_DOUBT_BOUND, _DOUBT_BOUND))
        if doubt.evidence > doubt.most:
            doubt.most, doubt.lasted = doubt.evidence, night + 1 - doubt.began
        if _REFUTED < doubt.evidence < _CONFIRMED:
            return
        del self.doubts[row]
        if doubt.evidence >= _CONFIRMED:
            return
        forecast.state[row], forecast.covariance[row] = doubt.state, doubt.covariance
        for late in range(doubt.began, night + 1):
            forecast.take_in(one, np.array([late]))
        self.next[row] = night + 1
        self.spells[row].append((doubt.lasted, abs(doubt.shift), night))
        self.found[row][-1] = replace(self.found[row][-1], refuted=self.table.nights[row][night])
