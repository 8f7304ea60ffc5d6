"""Comparisons of a model before and after a stage, their bounds, and the report of them all."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from buildlib.graph import interface
from buildlib.numerics.divergence import DivergenceSums
from buildlib.numerics.trace import Trace

Measure = Literal["bit-exact", "relative", "sqnr", "kl", "finite"]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Bound:
    """Bound that a comparison must meet.

    Attributes:
        measure: `bit-exact`, a largest relative difference, a least SQNR of the logits in dB, a
            largest KL divergence in nats, or nothing but finite values (the difference is then the
            cost of quantization).
        limit: limit of the measure; 0 if it has none.
    """

    measure: Measure
    limit: float = 0.0

    def __str__(self) -> str:
        match self.measure:
            case "relative":
                return f"relative <= {self.limit:g}"
            case "sqnr":
                return f"SQNR >= {self.limit:.3g} dB"
            case "kl":
                return f"KL <= {self.limit:g} nats"
            case _:
                return self.measure

    def holds(self, relative: float, sqnr_db: float, kl: float) -> bool:
        """Return whether finite values with these differences meet the bound."""
        match self.measure:
            case "bit-exact":
                return relative == 0
            case "relative":
                return relative <= self.limit
            case "sqnr":
                return sqnr_db >= self.limit
            case "kl":
                return kl <= self.limit
            case "finite":
                return True


EXACT = Bound("bit-exact")
SAME_FLOAT = Bound("relative", 1e-5)
SAME_MODEL = Bound("relative", 1e-4)  # two float32 programs that sum in different orders
SAME_HALF = Bound("sqnr", 40.0)
FINITE = Bound("finite")


@dataclass(frozen=True)
class StageComparison:
    """The outputs of a model after a stage against those before it, over the same tokens.

    With `a` before and `b` after, over logits and over each new key and value tensor:

    Attributes:
        stage: the stage between them: `import`, `arcl`, `split`, `mha2sha`, `quantize`, `compile`.
        subject: the graph: `ar128_cl4096`.
        max_abs_diff: largest |a - b| of all tensors.
        max_rel_diff: largest max|a - b| / max|a| of a tensor.
        sqnr_db: 10 log10(sum(a^2) / sum((a - b)^2)) over the logits; infinite when they are equal.
        kl_divergence: mean of D(before || after) of the next-token distributions, in nats.
        greedy_agreement: share of positions, 0 to 1, with the same likeliest token. The sample
            ends in the source's own greedy continuation: 1 means that the text is the same.
        positions: how many tokens of the sample this graph computed.
        bound: the bound in words.
        passed: whether it holds, all values being finite.
        note: the tensor that differs most, or why nothing was compared.
    """

    stage: str
    subject: str
    max_abs_diff: float = math.nan
    max_rel_diff: float = math.nan
    sqnr_db: float = math.nan
    kl_divergence: float = math.nan
    greedy_agreement: float = 0.0
    positions: int = 0
    bound: str = ""
    passed: bool = False
    note: str = ""


@dataclass(frozen=True)
class VerificationReport:
    """All comparisons of a build, in the order of its stages."""

    comparisons: tuple[StageComparison, ...]

    @property
    def passed(self) -> bool:
        """True if there are comparisons and all are within bounds."""
        return bool(self.comparisons) and all(one.passed for one in self.comparisons)

    @property
    def failures(self) -> tuple[StageComparison, ...]:
        """Comparisons out of bounds, the earliest stage first."""
        return tuple(one for one in self.comparisons if not one.passed)

    def to_json(self) -> str:
        """Return the report as JSON; a non-finite number (an infinite SQNR) is null."""
        rows = [
            {name: _finite(value) for name, value in asdict(one).items()}
            for one in self.comparisons
        ]
        return json.dumps({"passed": self.passed, "comparisons": rows}, indent=2, allow_nan=False)

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "VerificationReport":
        """Return the report that `to_json` wrote; a null is an infinite SQNR, or no number."""
        comparisons = []
        for row in answer["comparisons"]:
            fields = {name: value for name, value in row.items() if value is not None}
            if fields.keys() >= {"max_abs_diff"}:  # logits were compared
                fields.setdefault("sqnr_db", math.inf)
            comparisons.append(StageComparison(**fields))
        return cls(tuple(comparisons))


def _finite(value: Any) -> Any:  # noqa: ANN401  (JSON)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(
    stage: str,
    subject: str,
    bound: Bound,
    before: Trace,
    after: Trace,
    positions: npt.NDArray[np.intp],
) -> StageComparison:
    """Compare two traces of the same tokens at `positions`; see `StageComparison` for formulas."""
    positions = positions[positions < min(len(before.logits), len(after.logits))]
    tensors = {interface.LOGITS: (before.logits[positions], after.logits[positions])}
    for name in before.caches.keys() & after.caches.keys():
        tensors[name] = (before.caches[name][positions], after.caches[name][positions])
    caches = before.caches.keys() if before.caches else after.caches.keys()  # or logits alone
    differing = sorted(caches ^ after.caches.keys())
    differing += [name for name, (a, b) in tensors.items() if a.shape != b.shape]
    comparison = StageComparison(stage, subject, bound=str(bound))
    if not positions.size:
        return replace(comparison, note="no position of the sample ran in this graph")
    if differing:
        return replace(comparison, note=f"{differing[0]} is not the same tensor on both")
    relative = {name: relative_difference(a, b) for name, (a, b) in sorted(tensors.items())}
    worst = max(relative, key=lambda name: _rank(relative[name]))
    comparison = replace(
        comparison,
        max_abs_diff=max((float(np.abs(a - b).max()) for a, b in tensors.values()), key=_rank),
        max_rel_diff=relative[worst],
        positions=int(positions.size),
        note=f"largest in {worst}" if relative[worst] else "",
    )
    if not all(np.isfinite(x).all() for pair in tensors.values() for x in pair):
        return replace(comparison, note="values that are not finite")
    likeliest, sums = tensors[interface.LOGITS][0].argmax(axis=1), DivergenceSums()
    sums.add(after.logits[positions], before.logits[positions], likeliest)
    logits = sums.mean()
    return replace(
        comparison,
        sqnr_db=logits.sqnr_db,
        kl_divergence=logits.kl,
        greedy_agreement=logits.top1,
        passed=bound.holds(relative[worst], logits.sqnr_db, logits.kl),
    )


def relative_difference(reference: Floats, found: Floats) -> float:
    """Return max|a - b| / max|a| of a tensor; infinite if only the reference is all zeros."""
    difference, scale = float(np.abs(reference - found).max()), float(np.abs(reference).max())
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value
