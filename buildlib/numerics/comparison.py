"""Bounds of how far two models may be apart, what was found of each, and the report of all."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from buildlib.numerics.divergence import Divergence

Measure = Literal["bit-exact", "relative", "sqnr", "kl", "finite"]
Calls = Literal["prefill", "decode"]
"""Calls of as many tokens as a graph takes, or of one token after a prompt."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Bound:
    """Bound that a comparison of logits must meet.

    Attributes:
        measure: `bit-exact`, a largest relative difference, a least SQNR in dB, a largest KL
            divergence in nats, or nothing but finite values (the difference is then the cost of
            quantization).
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

    def holds(self, found: Divergence) -> bool:
        """Return whether finite logits meet the bound."""
        match self.measure:
            case "bit-exact":
                return found.relative == 0
            case "relative":
                return found.relative <= self.limit
            case "sqnr":
                return found.sqnr_db >= self.limit
            case "kl":
                return found.kl <= self.limit
            case "finite":
                return True


EXACT = Bound("bit-exact")
SAME_FLOAT = Bound("relative", 1e-5)
SAME_MODEL = Bound("relative", 1e-4)  # two float32 programs that sum in different orders
SAME_HALF = Bound("sqnr", 40.0)
FINITE = Bound("finite")


@dataclass(frozen=True)
class SideComparison:
    """A side beside the reference: a stage of a build, a model, a runtime.

    Attributes:
        where: what runs it, or the graph of a stage: `ar128_cl4096`.
        calls: how it was asked; None of a stage of a build.
        divergence: None of a side that cannot run, or whose logits cannot be compared.
        bound: in words.
        passed: whether it is within its bound.
        note: why nothing was compared.
    """

    side: str
    where: str = "-"
    calls: Calls | None = None
    divergence: Divergence | None = None
    bound: str = str(FINITE)
    passed: bool = True
    note: str = ""

    @property
    def found(self) -> Divergence:
        """The divergence, of a side that was compared."""
        if self.divergence is None:
            raise ValueError(f"{self.side} was not compared: {self.note}")
        return self.divergence

    def as_document(self) -> dict[str, object]:
        """Return it as JSON can hold it; a number that is not finite is null."""
        values: dict[str, object] = {}
        if (found := self.divergence) is not None:
            values = {"tokens": found.steps, **found.metrics}
            for key in ("sqnr_db", "relative"):
                value = getattr(found, key)
                values[key] = value if math.isfinite(value) else None
        own = {"side": self.side, "where": self.where, "calls": self.calls, **values}
        return {**own, "bound": self.bound, "passed": self.passed, "note": self.note}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "SideComparison":
        """Return what `as_document` wrote."""
        found = None
        if "tokens" in row:
            sqnr, relative = (
                math.inf if row[key] is None else float(row[key]) for key in ("sqnr_db", "relative")
            )
            found = Divergence(
                row["kl_divergence"],
                row["top1_agreement"],
                math.log(row["perplexity"]),
                math.log(row["perplexity_float"]),
                row["tokens"],
                sqnr_db=sqnr,
                relative=relative,
            )
        names = ("side", "where", "calls", "bound", "passed", "note")
        return cls(**{name: row[name] for name in names}, divergence=found)


@dataclass(frozen=True)
class VerificationReport:
    """All comparisons in order: those of a build's stages, or of sides behind their reference."""

    rows: tuple[SideComparison, ...]

    @property
    def passed(self) -> bool:
        """True if there are comparisons and all are within bounds."""
        return bool(self.rows) and not self.failures

    @property
    def failures(self) -> tuple[SideComparison, ...]:
        """Comparisons out of bounds, the earliest first."""
        return tuple(one for one in self.rows if not one.passed)

    def as_document(self) -> dict[str, object]:
        """Return it as JSON can hold it."""
        first = self.failures[0].side if self.failures else None
        rows = [row.as_document() for row in self.rows]
        return {"passed": self.passed, "first_outside": first, "sides": rows}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "VerificationReport":
        """Return what `as_document` wrote."""
        return cls(tuple(map(SideComparison.of, document["sides"])))


def relative_difference(reference: Floats, found: Floats) -> float:
    """Return max|a - b| / max|a| of a tensor; infinite if only the reference is all zeros."""
    difference, scale = float(np.abs(reference - found).max()), float(np.abs(reference).max())
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf
