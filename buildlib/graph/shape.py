"""`GraphShape`: tokens that a graph takes at once (AR) and slots it attends to (CL)."""

from dataclasses import dataclass

from buildlib.errors import BuildError

LONGEST_CONTEXT = 1 << 20


@dataclass(frozen=True, order=True)
class GraphShape:
    """The two sizes that distinguish the graphs of a model.

    Attributes:
        ar: autoregression length, tokens a call: 1 decodes, more prefill.
        cl: context length: the past plus these tokens.
    """

    ar: int
    cl: int

    def __post_init__(self) -> None:
        if self.ar < 1:
            raise shape_error(self.ar, self.cl, "AR must be at least 1")
        if self.cl <= self.ar:
            raise shape_error(self.ar, self.cl, "CL must be larger than AR")
        if self.cl > LONGEST_CONTEXT:
            raise shape_error(self.ar, self.cl, f"CL can be {LONGEST_CONTEXT} at most")
        if self.cl % self.ar:
            divisors = [d for d in range(1, self.cl) if self.cl % d == 0]
            below = max(d for d in divisors if d < self.ar)
            above = min((d for d in divisors if d > self.ar), default=below)
            near = ", ".join(map(str, dict.fromkeys((below, above))))
            reason = f"AR must divide CL; divisors near {self.ar}: {near}"
            raise shape_error(self.ar, self.cl, reason)

    def __str__(self) -> str:
        return f"ar{self.ar}_cl{self.cl}"

    @property
    def past(self) -> int:
        """Slots of the key/value inputs, CL - AR."""
        return self.cl - self.ar


def shape_error(ar: int, cl: int, reason: str) -> BuildError:
    """Return the error of an (AR, CL) that a graph cannot have."""
    return BuildError(f"invalid shape AR {ar}, CL {cl}: {reason}")


def check_context(shape: GraphShape, limit: tuple[int, str] | None) -> None:
    """Refuse a context longer than the model can have (`DecoderConfig.context_limit`)."""
    if limit is not None and shape.cl > limit[0]:
        reason = f"{limit[1]} in config.json): choose a context length up to that"
        raise shape_error(shape.ar, shape.cl, reason)
