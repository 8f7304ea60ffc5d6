"""Sizes at which the source is interpreted, and numbers for inputs other than tokens."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.graph.folding import Refusal
from buildlib.graph.interface import MASKED
from plugins.onnx_exports.roles import Role

_AR, _PAST = 11, 62
"""Sizes of symbolic dimensions, unusual in models, so that no transposed tensor fits."""

_THETA = 10000.0
_HIDDEN_STEP = 3  # every third slot of the past is hidden, where a host can
_MOST_NUMBERS = 1 << 30  # in one input: AR 8192 at CL 131072 has as many in its mask


@dataclass(frozen=True)
class Probe:
    """Sizes at which a source is interpreted.

    Attributes:
        is_fixed: they are the export's own, not chosen here.
        full_tables: cosines and sines come for both halves of a head, not for one.
        holes: the host feeds the mask, so it can hide slots of the past too.
    """

    ar: int
    past: int
    is_fixed: bool
    full_tables: bool = False
    holes: bool = False

    @property
    def cl(self) -> int:
        """Slots that a token can look at."""
        return self.ar + self.past

    def dims(self, role: Role) -> tuple[int, ...]:
        """Return the shape of an input, with symbols bound."""
        sizes = _required_sizes(role, self)
        dims = tuple(
            dim if isinstance(dim, int) else sizes.get(axis, 1)
            for axis, dim in enumerate(role.shape)
        )
        for axis, size in sizes.items():
            if dims[axis] != size:
                reason = f"its dimension {axis} is {dims[axis]}, not {size}"
                raise Refusal(f"input {role.value.name} {list(dims)}: {reason}")
        if math.prod(dims) > _MOST_NUMBERS:
            raise Refusal(f"input {role.value.name} {list(dims)} is too large to be computed with")
        return dims

    def numbers(self, role: Role) -> npt.NDArray[Any]:
        """Return mask, positions, cosines or sines, as a host feeds them with all slots full."""
        dims, dtype = self.dims(role), role.dtype
        if role.kind == "mask":
            return self._mask(dims, dtype)
        where = np.arange(self.past, self.cl)
        if role.kind == "positions":
            return np.broadcast_to(where, dims).astype(dtype)
        width = dims[-1] // 2 if self.full_tables else dims[-1]
        frequencies = _THETA ** -(np.arange(width, dtype=np.float64) / width)
        angles = np.outer(where, np.resize(frequencies, dims[-1]))
        table = np.cos(angles) if role.kind == "cos" else np.sin(angles)
        return np.broadcast_to(table, dims).astype(dtype)

    def fed_tables(
        self, roles: Iterable[Role]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
        """Return cosines and sines [AR, width/2] from the host, or None."""
        tables: dict[str, npt.NDArray[np.float64]] = {}
        for role in roles:
            if role.kind in {"cos", "sin"}:
                numbers = self.numbers(role).astype(np.float64)
                width = numbers.shape[-1] // 2 if self.full_tables else numbers.shape[-1]
                tables[role.kind] = numbers.reshape(-1, *numbers.shape[-2:])[0, :, :width]
        return (tables["cos"], tables["sin"]) if len(tables) == 2 else None

    def visible(self) -> npt.NDArray[np.bool_]:
        """Return the slots [AR, CL] each token may see, with holes if a host can hide slots."""
        slots = np.arange(self.cl)
        visible = slots[None] <= self.past + np.arange(self.ar)[:, None]
        if self.holes:
            visible &= (slots >= self.past) | (slots % _HIDDEN_STEP != 0)
        return visible

    @property
    def first_visible(self) -> int:
        """The first slot that any token sees."""
        return int(np.flatnonzero(self.visible()[-1])[0])

    def _mask(self, dims: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        if len(dims) <= 2:
            return np.ones(dims, dtype)
        visible = np.broadcast_to(self.visible(), dims)
        if dtype == np.bool_:
            return visible.copy()
        return np.where(visible, 0.0, MASKED).astype(dtype)


def find_probe(roles: list[Role]) -> Probe:
    """Return the sizes that the inputs agree on."""
    tokens = next(role for role in roles if role.kind in {"ids", "embeds"})
    mask = next((role for role in roles if role.kind == "mask"), None)
    ar = _size(tokens, 1 if tokens.kind == "embeds" else -1)
    total = _size(mask, -1) if mask is not None else None
    holes = mask is not None and len(mask.shape) > 2
    key = next(role for role in roles if role.kind == "key")
    free = [axis for axis in range(1, len(key.shape)) if _size(key, axis) is None]
    if (ar is None) != (total is None) and mask is not None:
        raise Refusal(f"{tokens.value.name} and {mask.value.name}: one is fixed, one symbolic")
    if mask is not None and ar is not None and total is not None:
        if total <= ar:
            raise Refusal(f"{total} slots in {mask.value.name} leave no past before {ar} tokens")
        return Probe(ar, total - ar, is_fixed=True, holes=holes)
    if not free:
        raise Refusal(
            f"no mask and no symbolic dimension tell the past in {key.value.name}. Export it with "
            "an attention_mask, or with dynamic lengths"
        )
    return Probe(ar or _AR, _PAST, is_fixed=False, holes=holes)


def cache_axis(role: Role, past: int) -> int | None:
    """Return the axis of a cache that counts tokens, if its shape tells."""
    free = [axis for axis in range(1, len(role.shape)) if _size(role, axis) is None]
    same = [axis for axis, dim in enumerate(role.shape) if dim == past]
    axes = free or same
    return axes[0] if len(axes) == 1 else None


def _required_sizes(role: Role, probe: Probe) -> dict[int, int]:
    rank = len(role.shape)
    if role.kind == "mask":
        return {0: 1, rank - 1: probe.cl} | ({rank - 2: probe.ar} if rank > 3 else {})
    if role.kind == "embeds":
        return {0: 1, 1: probe.ar}
    if role.kind in {"ids", "positions"}:
        return {rank - 1: probe.ar} | ({0: 1} if rank > 1 else {})
    if role.kind in {"cos", "sin"}:
        return {rank - 2: probe.ar}
    axis = cache_axis(role, probe.past)
    if axis is None:
        if probe.past not in role.shape.dims:
            shape = f"{role.value.name} {role.shape}"
            raise Refusal(f"input {shape}: no dimension is the past {probe.past}")
        return {}
    return {axis: probe.past}


def _size(role: Role, axis: int) -> int | None:
    dim = role.shape[axis]
    return dim if isinstance(dim, int) else None
