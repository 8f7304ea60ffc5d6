"""What a verification found: a comparison for each stage and graph, and whether it is in bounds."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Measure = Literal["bit-exact", "relative", "sqnr", "finite"]


@dataclass(frozen=True)
class Bound:
    """What a comparison must meet.

    Attributes:
        measure: `bit-exact`, a largest relative difference, a least SQNR of the logits in dB, or
            nothing but finite values (the difference is then what quantization costs).
        limit: of the measure; 0 where there is none.
    """

    measure: Measure
    limit: float = 0.0

    def __str__(self) -> str:
        match self.measure:
            case "relative":
                return f"relative <= {self.limit:g}"
            case "sqnr":
                return f"SQNR >= {self.limit:g} dB"
            case _:
                return self.measure


@dataclass(frozen=True)
class StageComparison:
    """The outputs of a model after a stage against those before it, over the same tokens.

    With `a` before and `b` after, over logits and over each new key and value tensor:

    Attributes:
        stage: what lies between: `import`, `arcl`, `split`, `mha2sha`, `quantize`, `compile`.
        subject: the graph: `ar128_cl4096`.
        max_abs_diff: largest |a - b| of all tensors.
        max_rel_diff: largest max|a - b| / max|a| of a tensor.
        sqnr_db: 10 log10(sum(a^2) / sum((a - b)^2)) over the logits; infinite when they are equal.
        greedy_agreement: share of positions, 0 to 1, whose likeliest token is the same. The sample
            ends in the source's own greedy continuation: 1 means that the text is the same.
        positions: how many tokens of the sample this graph computed.
        bound: what was asked for, in words.
        passed: whether it holds, all values being finite.
        note: the tensor that differs most, or why there is nothing to compare.
    """

    stage: str
    subject: str
    max_abs_diff: float
    max_rel_diff: float
    sqnr_db: float
    greedy_agreement: float
    positions: int
    bound: str
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class VerificationReport:
    """All comparisons of a build, in the order of its stages."""

    comparisons: tuple[StageComparison, ...]

    @property
    def passed(self) -> bool:
        """Whether something was compared and every comparison is in its bounds."""
        return bool(self.comparisons) and all(one.passed for one in self.comparisons)

    @property
    def failures(self) -> tuple[StageComparison, ...]:
        """Comparisons out of bounds; the first is where to look."""
        return tuple(one for one in self.comparisons if not one.passed)

    def to_json(self) -> str:
        """The report as JSON; a number that is not finite (an infinite SQNR) is null."""
        rows = [
            {name: _finite(value) for name, value in asdict(one).items()}
            for one in self.comparisons
        ]
        return json.dumps({"passed": self.passed, "comparisons": rows}, indent=2, allow_nan=False)


def _finite(value: Any) -> Any:  # noqa: ANN401  (JSON)
    return None if isinstance(value, float) and not math.isfinite(value) else value
