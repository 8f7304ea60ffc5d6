"""Smallest mixed precision within a bound: which tensors get more bits, found by measuring."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from buildlib.encodings.model import Encoding
from buildlib.errors import InvalidOptionError
from buildlib.evaluation.sensitivity import Sensitivity, Unit, UnitCost, UnitKind
from buildlib.evaluation.sweep import Quantized, SensitivityModel
from buildlib.reference.divergence import Divergence

_BOUND = re.compile(r"(kl ?[=:] ?)?(\d{1,9}(?:\.\d{1,9})?) ?(%)?")
DEFAULT_ATTEMPTS = 16


@dataclass(frozen=True)
class QualityBound:
    """Greatest distance from float, or greatest perplexity, that is accepted.

    Attributes:
        measure: `perplexity`; `relative`, how far the perplexity is above that of the model in
            float, as a part of it; or `kl`, the mean divergence in nats.
    """

    measure: Literal["perplexity", "relative", "kl"]
    limit: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `2%` (of float), `20` (a perplexity) or `kl=0.01` (nats).

        Raises:
            InvalidOptionError: it is none of these.
        """
        match = _BOUND.fullmatch(text.strip().lower())
        if match is None or (match[1] and match[3]):
            raise InvalidOptionError(
                "bound",
                f"{text[:20]!r} is none: give a perplexity, as 20, its distance from float, as 2%, "
                "or a KL divergence in nats, as kl=0.01",
                (),
            )
        number = float(match[2])
        if match[1]:
            return cls("kl", number)
        return cls("relative", number / 100) if match[3] else cls("perplexity", number)

    def __str__(self) -> str:
        if self.measure == "relative":
            return f"perplexity at most {self.limit * 100:g}% above float"
        return f"{'KL divergence' if self.measure == 'kl' else 'perplexity'} at most {self.limit:g}"

    def value(self, found: Divergence) -> float:
        """Return what is held against the limit."""
        if self.measure == "kl":
            return found.kl
        if self.measure == "perplexity":
            return found.perplexity
        return math.expm1(found.loss - found.loss_float)

    def holds(self, found: Divergence) -> bool:
        """Whether a model is within the bound."""
        return self.value(found) <= self.limit


Measure = Callable[[Sequence[Unit]], Divergence]
"""Measures the model with these units at their higher bits, and all others at their lower."""


@dataclass(frozen=True)
class Proposal:
    """Tensors that get more bits, and what that gives, as measured.

    Attributes:
        raised: units with twice the bits, in the order of their gain.
        before: divergence of the model from float without them.
        after: the same with them.
        met: whether `after` is within the bound; if not, everything that can is at the higher bits.
        measurements: how many mixtures were measured.
    """

    bound: QualityBound
    raised: tuple[Unit, ...]
    before: Divergence
    after: Divergence
    met: bool
    measurements: int

    @property
    def bits(self) -> dict[str, int]:
        """Bits by name of each tensor that gets more."""
        return {
            name: encoding.stored_bits
            for unit in self.raised
            for name, encoding in unit.high.items()
        }

    @property
    def bytes_more(self) -> int:
        """Bytes that a decode step reads more."""
        return sum(unit.bytes_more for unit in self.raised)


def propose_precision(
    costs: Sequence[UnitCost],
    bound: QualityBound,
    measure: Measure,
    *,
    kinds: Sequence[UnitKind] = ("weight",),
    attempts: int = DEFAULT_ATTEMPTS,
) -> Proposal:
    """Find few bytes of additional bits with which the model is within a bound.

    Units are ordered by what they cost alone, in nats per byte that their higher bits add. The
    shortest head of that order within the bound is found by bisection, each step of it measured;
    then its units are tried without, the largest first. Measured, not estimated: the sum of single
    costs tells little about the whole.

    Args:
        costs: by tensor or by layer.
        bound: to get within.
        measure: `measure_sweep`, or what builds the model.
        kinds: kinds of units that may get more bits.
        attempts: how many units are tried without once the bound is met.
    """
    search = _Search(measure, bound)
    order = _by_gain(costs, kinds)
    if search.holds(()):
        return search.proposal(())
    if not order or not search.holds(order):
        return search.proposal(order)
    low, high = 0, len(order)  # within the bound at `high`, outside at `low`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if search.holds(order[:middle]) else (middle, high)
    kept = list(order[:high])
    for unit in sorted(kept, key=lambda unit: -unit.bytes_more)[:attempts]:
        others = [one for one in kept if one is not unit]
        if search.holds(others):
            kept = others
    return search.proposal(kept)


def mixed_encodings(encodings: Quantized, raised: Sequence[Unit]) -> dict[str, Encoding]:
    """Return the encodings of a model with some units at their higher bits."""
    high = {name: encoding for unit in raised for name, encoding in unit.high.items()}
    return {**encodings, **high}


def measure_sweep(model: SensitivityModel, sensitivity: Sensitivity) -> Measure:
    """Return what measures mixtures by rounding the float model, on the windows of the ranking."""

    def measure(raised: Sequence[Unit]) -> Divergence:
        if not raised:
            return sensitivity.whole
        mixed = mixed_encodings(sensitivity.encodings, raised)
        [measured] = model.measure([mixed], mixed)
        return measured.divergence

    return measure


def _by_gain(costs: Sequence[UnitCost], kinds: Sequence[UnitKind]) -> list[Unit]:
    raisable = [cost for cost in costs if cost.unit.high and cost.unit.kind in kinds]
    raisable.sort(key=lambda cost: -cost.alone.kl / max(1, cost.unit.bytes_more))
    return [cost.unit for cost in raisable]


class _Search:
    """Mixtures that were measured, each once."""

    def __init__(self, measure: Measure, bound: QualityBound) -> None:
        self._measure = measure
        self._bound = bound
        self._known: dict[frozenset[str], Divergence] = {}

    def holds(self, raised: Sequence[Unit]) -> bool:
        """Whether the model with these raised is within the bound."""
        return self._bound.holds(self._find(raised))

    def proposal(self, raised: Sequence[Unit]) -> Proposal:
        """Make a proposal of these."""
        before, after = self._find(()), self._find(raised)
        met = self._bound.holds(after)
        return Proposal(self._bound, tuple(raised), before, after, met, len(self._known))

    def _find(self, raised: Sequence[Unit]) -> Divergence:
        key = frozenset(unit.name for unit in raised)
        if key not in self._known:
            self._known[key] = self._measure(raised)
        return self._known[key]
