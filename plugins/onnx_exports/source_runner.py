"""Runner of an original export under the names and shapes of the canonical graph.

Exports differ in the names of their inputs, in the order of the axes of their caches, in whether a
cache comes back whole or as its new part, and in the form of mask and positions. The canonical
inputs hold all of that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.config import DecoderConfig
from buildlib.errors import ModelFileError
from buildlib.graph import interface
from buildlib.graph.files import load_model
from buildlib.graph.folding import Refusal
from buildlib.graph.shape import GraphShape
from buildlib.numerics.runners import Arrays, Port, Ports, open_session, run_session
from plugins.onnx_exports.roles import Role, cache_name, find_roles

Array = npt.NDArray[Any]
Axis = Literal["batch", "head", "dim", "slot"]
Layout = tuple[Axis, ...]

_KEY: Layout = ("head", "batch", "dim", "slot")
_VALUE: Layout = ("head", "batch", "slot", "dim")
_OTHERS: tuple[Layout, ...] = (
    ("batch", "head", "slot", "dim"),
    ("batch", "head", "dim", "slot"),
    _VALUE,
    _KEY,
    ("batch", "slot", "head", "dim"),
)


@dataclass(frozen=True)
class _Cache:
    """A key or value tensor of the export, its canonical counterpart and its axes."""

    name: str
    kind: Literal["key", "value"]
    layer: int
    head: int | None
    layout: Layout
    dtype: np.dtype[Any]

    def canonical(self, end: str) -> str:
        make = interface.past_key if self.kind == "key" else interface.past_value
        return make(self.layer, end)

    @property
    def own(self) -> Layout:
        return _KEY if self.kind == "key" else _VALUE

    def from_canonical(self, array: Array) -> Array:
        part = array if self.head is None else array[self.head : self.head + 1]
        turned = part.transpose([self.own.index(axis) for axis in self.layout])
        return np.ascontiguousarray(turned, self.dtype)

    def to_canonical(self, array: Array, n_new: int) -> Array:
        turned = array.transpose([self.layout.index(axis) for axis in self.own])
        slots = [slice(None)] * 4
        slots[self.own.index("slot")] = slice(turned.shape[self.own.index("slot")] - n_new, None)
        return turned[tuple(slots)].astype(np.float32)


class SourceRunner:
    """`PartRunner` of the canonical model, on an export and ONNX Runtime's CPU provider.

    Args:
        path: the export, with symbolic dimensions or fixed at `shape`.
        config: gives number and size of key/value heads.
        shape: of the imported model.
    """

    def __init__(self, path: Path, config: DecoderConfig, shape: GraphShape) -> None:
        model = load_model(path)
        try:
            roles = find_roles(model)
        except Refusal as refusal:
            raise ModelFileError(path, str(refusal)) from refusal
        sizes = {
            "batch": 1, "head": config.num_key_value_heads, "dim": config.head_dim,
            "slot": shape.past,
        }  # fmt: skip
        self._path = path
        self._shape = shape
        self._others = [role for role in roles if role.kind not in {"key", "value"}]
        kinds = {role.kind for role in self._others}
        self._counts_slots = not kinds & {"positions", "cos"}
        self._past = [
            _cache(path, role, "key" if role.kind == "key" else "value", sizes)
            for role in roles
            if role.kind in {"key", "value"}
        ]
        layouts = {(one.kind, one.layer): (one.layout, one.dtype) for one in self._past}
        self._new = []
        for value in model.graph.outputs:
            cache_key = cache_name(str(value.name))
            if cache_key is not None and cache_key[:2] in layouts:
                self._new.append(_Cache(str(value.name), *cache_key, *layouts[cache_key[:2]]))
        caches = {cache.name for cache in self._new}
        others = [n for value in model.graph.outputs if (n := str(value.name)) not in caches]
        self._logits = next((n for n in others if "logit" in n.lower()), (others or [""])[0])
        self._logits_dims = (1, shape.ar, config.vocab_size)
        self.ports = _ports(config, shape, {role.kind for role in roles})
        self._session = open_session(path)

    def run(self, feeds: Arrays) -> Arrays:
        """Return all outputs of the canonical model."""
        feeds = self._aligned(feeds)
        inputs: dict[str, Array] = {
            str(role.value.name): self._array_for(role, feeds) for role in self._others
        }
        for cache in self._past:
            inputs[cache.name] = cache.from_canonical(feeds[cache.canonical("in")])
        names = [self._logits, *(cache.name for cache in self._new)]
        logits, *arrays = run_session(self._path, self._session, names, inputs)
        dims = tuple(size for size in logits.shape if size != 1)
        if dims != tuple(size for size in self._logits_dims if size != 1):
            reason = f"output {self._logits} is {list(logits.shape)}, not {list(self._logits_dims)}"
            raise ModelFileError(self._path, f"{reason}: there is nothing to verify it by")
        outputs: dict[str, Array] = {
            interface.LOGITS: logits.reshape(self._logits_dims).astype(np.float32)
        }
        heads: dict[str, dict[int, Array]] = {}
        for cache, array in zip(self._new, arrays, strict=True):
            part = cache.to_canonical(array, self._shape.ar)
            heads.setdefault(cache.canonical("out"), {})[cache.head or 0] = part
        for name, parts in heads.items():
            outputs[name] = np.concatenate([parts[head] for head in sorted(parts)])
        return outputs

    def close(self) -> None:
        """Free the session."""
        self._session = None

    def _aligned(self, feeds: Arrays) -> Arrays:
        """Move the past to the end of its slots: an export's window counts empty ones, too.

        An export that makes its positions itself counts all slots, and gets no empty ones.
        """
        past, mask = self._shape.past, feeds[interface.ATTENTION_MASK]
        empty = past - int(np.count_nonzero(mask[0, 0, 0, :past] == 0))
        caches = {
            name: np.roll(array, empty, interface.token_axis(name))
            for name, array in feeds.items()
            if interface.is_kv(name)
        }
        mask = np.concatenate([np.roll(mask[..., :past], empty, -1), mask[..., past:]], axis=-1)
        if self._counts_slots:
            caches = {
                name: np.take(array, range(empty, past), interface.token_axis(name))
                for name, array in caches.items()
            }
            mask = mask[..., empty:]
        return {**feeds, **caches, interface.ATTENTION_MASK: mask}

    def _array_for(self, role: Role, feeds: Arrays) -> Array:
        make: dict[str, Callable[[], Array]] = {
            "ids": lambda: feeds[interface.INPUT_IDS],
            "embeds": lambda: feeds[interface.INPUTS_EMBEDS],
            "mask": lambda: self._mask(role, feeds[interface.ATTENTION_MASK]),
            "positions": lambda: self._positions(feeds[interface.ATTENTION_MASK]),
            "cos": lambda: self._table(role, feeds[interface.COS]),
            "sin": lambda: self._table(role, feeds[interface.SIN]),
        }
        array = make[role.kind]()
        while array.ndim > len(role.shape) and 1 in array.shape:
            array = array.squeeze(array.shape.index(1))
        return np.ascontiguousarray(array.astype(role.dtype))

    def _mask(self, role: Role, mask: Array) -> Array:
        """Return the mask as the export takes it: additive, boolean, or used slots."""
        visible = np.asarray(mask == 0)
        if len(role.shape) <= 2:
            return np.asarray(visible[0].any(axis=1))
        return visible if role.value.dtype == ir.DataType.BOOL else mask

    def _positions(self, mask: Array) -> Array:
        n_past = int(np.count_nonzero(mask[0, 0, 0, : self._shape.past] == 0))
        return np.arange(n_past, n_past + self._shape.ar)[None]

    @staticmethod
    def _table(role: Role, table: Array) -> Array:
        """Return cosines of half a head, or twice, for exports that multiply whole heads."""
        return np.tile(table, 2) if role.shape[-1] == 2 * table.shape[-1] else table


def _cache(
    path: Path, role: Role, kind: Literal["key", "value"], sizes: Mapping[str, int]
) -> _Cache:
    name = str(role.value.name)
    own_heads = sizes if role.head is None else {**sizes, "head": 1}
    canonical = _KEY if kind == "key" else _VALUE
    for layout in (canonical, *_OTHERS) if name.endswith("_in") else _OTHERS:
        fits = (
            dim == own_heads[axis] if isinstance(dim, int) else axis in {"batch", "slot"}
            for axis, dim in zip(layout, role.shape, strict=False)
        )
        if len(role.shape) == len(layout) and all(fits):
            return _Cache(name, kind, role.layer, role.head, layout, role.dtype)
    reason = f"cache {name} {list(role.shape)} is not one of {dict(own_heads)}"
    raise ModelFileError(path, reason)


def _ports(config: DecoderConfig, shape: GraphShape, kinds: set[str]) -> Ports:
    """Return names and shapes of the canonical model; values are float, ids int32."""
    inputs = dict(interface.input_shapes(config, shape))
    inputs[interface.COS] = inputs[interface.SIN] = (1, 1, shape.ar, config.rotary_dim // 2)
    if "embeds" in kinds:
        del inputs[interface.INPUT_IDS]
        inputs[interface.INPUTS_EMBEDS] = (1, shape.ar, config.hidden_size)
    logits: tuple[int, ...] = (1, shape.ar, config.vocab_size)
    outputs = {interface.LOGITS: logits}
    for name, dims in inputs.items():
        if interface.is_kv(name):
            new = interface.kv_output(name)
            outputs[new] = interface.dims_at(new, dims, shape)

    def ports(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Port]:
        ids, real = np.dtype(np.int32), np.dtype(np.float32)
        return {
            name: Port(name, ids if name == interface.INPUT_IDS else real, dims)
            for name, dims in shapes.items()
        }

    return Ports(ports(inputs), ports(outputs))
