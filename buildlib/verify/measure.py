"""How far two traces are apart."""

import math

import numpy as np
import numpy.typing as npt

from buildlib.graph import interface
from buildlib.verify.report import Bound, StageComparison
from buildlib.verify.trace import Trace

Floats = npt.NDArray[np.float32]


def compare(
    stage: str,
    subject: str,
    bound: Bound,
    before: Trace,
    after: Trace,
    positions: npt.NDArray[np.intp],
) -> StageComparison:
    """Compare two traces of the same tokens at `positions`; see `StageComparison` for formulas."""
    positions = positions[positions < min(before.n_positions, after.n_positions)]
    tensors = {interface.LOGITS: (before.logits[positions], after.logits[positions])}
    for name in before.caches.keys() & after.caches.keys():
        tensors[name] = (before.caches[name][positions], after.caches[name][positions])
    if not positions.size:
        return _nothing(stage, subject, bound, "no position of the sample ran in this graph")
    differing = sorted(before.caches.keys() ^ after.caches.keys())
    differing += [name for name, (a, b) in tensors.items() if a.shape != b.shape]
    if differing:
        return _nothing(stage, subject, bound, f"{differing[0]} is not the same tensor on both")
    absolute, relative = {}, {}
    for name, (a, b) in tensors.items():
        absolute[name] = float(np.abs(a - b).max())
        relative[name] = relative_difference(a, b)
    worst = max(sorted(relative), key=lambda name: _rank(relative[name]))
    a, b = tensors[interface.LOGITS]
    sqnr = sqnr_db(a, b)
    finite = all(np.isfinite(x).all() for pair in tensors.values() for x in pair)
    return StageComparison(
        stage=stage,
        subject=subject,
        max_abs_diff=max(absolute.values(), key=_rank),
        max_rel_diff=relative[worst],
        sqnr_db=sqnr,
        greedy_agreement=float(np.mean(a.argmax(axis=-1) == b.argmax(axis=-1))),
        positions=int(positions.size),
        bound=str(bound),
        passed=finite and _holds(bound, relative[worst], sqnr),
        note="" if finite and relative[worst] == 0 else _note(worst, finite=finite),
    )


def sqnr_db(reference: Floats, found: Floats) -> float:
    """10 log10(sum(a^2) / sum((a - b)^2)): infinite when equal, NaN with what is not finite.

    A reference of zeros that is not met gives minus infinity.
    """
    a = reference.astype(np.float64)
    signal, noise = float(np.sum(a**2)), float(np.sum((a - found) ** 2))
    if math.isnan(signal) or math.isnan(noise) or math.isinf(signal):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and not math.isinf(noise) else -math.inf


def relative_difference(reference: Floats, found: Floats) -> float:
    """max|a - b| / max|a| of a tensor; infinite where only the reference is all zeros."""
    difference, scale = float(np.abs(reference - found).max()), float(np.abs(reference).max())
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf


def _holds(bound: Bound, relative: float, sqnr: float) -> bool:
    match bound.measure:
        case "bit-exact":
            return relative == 0
        case "relative":
            return relative <= bound.limit
        case "sqnr":
            return sqnr >= bound.limit
        case "finite":
            return True


def _note(worst: str, *, finite: bool) -> str:
    return f"largest in {worst}" if finite else "values that are not finite"


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _nothing(stage: str, subject: str, bound: Bound, note: str) -> StageComparison:
    return StageComparison(
        stage, subject, math.nan, math.nan, math.nan, 0.0, 0, str(bound), passed=False, note=note
    )
