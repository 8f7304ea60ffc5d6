"""Smallest mixed precision within a bound: which tensors get more bits, found by measuring."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from buildlib.encodings.model import Encoding
from buildlib.errors import InvalidOptionError
from buildlib.numerics.divergence import Divergence
from buildlib.quantize.mixed_precision.sensitivity import Unit, UnitCost, UnitKind
from buildlib.quantize.mixed_precision.sweep import Quantized, SensitivityModel

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
        """Read `2%` (of float), `20` (a perplexity) or `kl=0.01` (nats)."""
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
        """Return the figure that the limit bounds."""
        if self.measure == "kl":
            return found.kl
        if self.measure == "perplexity":
            return found.perplexity
        return math.expm1(found.loss - found.loss_float)

    def show(self, found: Divergence) -> str:
        """Format the figure that the limit bounds."""
        value = self.value(found)
        if self.measure == "relative":
            return f"{value:+.2%} from float"
        return f"{'KL divergence' if self.measure == 'kl' else 'perplexity'} {value:.4g}"

    def beside(self, found: Divergence) -> "QualityBound":
        """Return this bound for other texts: a perplexity becomes its distance from float.

        Args:
            found: any model on the text that the bound is meant for.
        """
        if self.measure != "perplexity":
            return self
        return QualityBound("relative", self.limit / found.perplexity_float - 1)

    def holds(self, found: Divergence) -> bool:
        """Return whether a model is within the bound."""
        return self.value(found) <= self.limit


Measure = Callable[[Sequence[Unit]], Divergence]
"""Measures the model with these units at their higher bits, and all others at their lower."""


@dataclass(frozen=True)
class Proposal:
    """Tensors that get more bits, and the measured result.

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


class PrecisionSearch:
    """Search for few bytes of additional bits with which a model is within a bound.

    Units are ordered by their cost alone, in nats per byte that their higher bits add.
    Mixtures are measured, each once, not estimated: the sum of single costs tells little about the
    whole.

    Args:
        measure: `measure_sweep`, or one that builds the model.
        kinds: kinds of units that may get more bits.
    """

    def __init__(
        self,
        costs: Sequence[UnitCost],
        bound: QualityBound,
        measure: Measure,
        kinds: Sequence[UnitKind] = ("weight",),
    ) -> None:
        raisable = [cost for cost in costs if cost.unit.high and cost.unit.kind in kinds]
        raisable.sort(key=lambda cost: -cost.alone.kl / max(1, cost.unit.bytes_more))
        self._order = [cost.unit for cost in raisable]
        self._bound = bound
        self._measure = measure
        self._known: dict[frozenset[str], Divergence] = {}

    def propose(self, attempts: int = DEFAULT_ATTEMPTS) -> Proposal:
        """Find a mixture within the bound.

        The shortest head of the order within the bound is found by bisection; then its units are
        tried without, the largest first.

        Args:
            attempts: how many units are tried without once the bound is met.
        """
        order = self._order
        if self._holds(()):
            return self._proposal(())
        if not order or not self._holds(order):
            return self._proposal(order)
        raised = list(order[: self._shortest(lambda n: self._holds(order[:n]), len(order))])
        for unit in sorted(raised, key=lambda unit: -unit.bytes_more)[:attempts]:
            others = [one for one in raised if one is not unit]
            if self._holds(others):
                raised = others
        return self._proposal(raised)

    def extend(self, proposal: Proposal, margin: float) -> Proposal | None:
        """Raise the next units of the order, for a model that turned out to be worse than measured.

        They are the fewest with which the bound holds by the margin; if none do, as many again as
        the proposal has.

        Args:
            margin: how much worse the model is than the proposal says, in the bound's measure.

        Returns:
            None if the proposal has all that can be raised.
        """
        names = {unit.name for unit in proposal.raised}
        candidates = [unit for unit in self._order if unit.name not in names]
        if not candidates:
            return None
        limit = self._bound.limit - max(margin, 0.0)

        def suffices(count: int) -> bool:
            return self._bound.value(self._find((*proposal.raised, *candidates[:count]))) <= limit

        count = min(len(candidates), max(1, len(proposal.raised)))
        if limit > 0 and suffices(len(candidates)):
            count = self._shortest(suffices, len(candidates))
        return self._proposal((*proposal.raised, *candidates[:count]))

    @staticmethod
    def _shortest(holds: Callable[[int], bool], most: int) -> int:
        """Return the least count that holds, by bisection; `most` does, and 0 does not."""
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high

    def _holds(self, raised: Sequence[Unit]) -> bool:
        return self._bound.holds(self._find(raised))

    def _proposal(self, raised: Sequence[Unit]) -> Proposal:
        before, after = self._find(()), self._find(raised)
        met = self._bound.holds(after)
        return Proposal(self._bound, tuple(raised), before, after, met, len(self._known))

    def _find(self, raised: Sequence[Unit]) -> Divergence:
        key = frozenset(unit.name for unit in raised)
        if key not in self._known:
            self._known[key] = self._measure(raised)
        return self._known[key]


def mixed_encodings(encodings: Quantized, raised: Sequence[Unit]) -> dict[str, Encoding]:
    """Return the encodings of a model with some units at their higher bits."""
    high = {name: encoding for unit in raised for name, encoding in unit.high.items()}
    return {**encodings, **high}


def measure_sweep(model: SensitivityModel, encodings: Quantized) -> Measure:
    """Return a measure of mixtures that rounds the float model, on the windows of `model`.

    Args:
        model: which has recorded its logits in float.
        encodings: of the whole model without mixtures, by name.
    """

    def measure(raised: Sequence[Unit]) -> Divergence:
        mixed = mixed_encodings(encodings, raised)
        [variant] = model.measure([mixed], mixed)
        return variant.divergence

    return measure
