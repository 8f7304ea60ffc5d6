"""Roles of the inputs of an export, inferred from name, type and rank, for any exporter."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from buildlib.graph.folding import Refusal

Kind = Literal["ids", "embeds", "mask", "positions", "cos", "sin", "key", "value"]

_KEY = {"key", "keys", "k"}
_VALUE = {"value", "values", "v"}
_HEAD = {"h", "head", "heads"}


@dataclass(frozen=True)
class Role:
    """Role of one input.

    Attributes:
        layer: layer of a key or value cache.
        head: head of a cache that holds only one.
    """

    kind: Kind
    value: ir.Value
    layer: int = -1
    head: int | None = None

    @property
    def shape(self) -> ir.Shape:
        """Shape of the input."""
        assert self.value.shape is not None  # noqa: S101  (`find_roles` refuses those without)
        return self.value.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the input."""
        assert self.value.dtype is not None  # noqa: S101  (`find_roles` refuses those without)
        return self.value.dtype.numpy()


def find_roles(model: ir.Model) -> list[Role]:
    """Return the role of every used input."""
    initializers = set(model.graph.initializers.values())
    inputs = [value for value in model.graph.inputs if value not in initializers]
    roles = [_role(value) for value in inputs]
    by_key: dict[tuple[Kind, int, int | None], Role] = {}
    for role in roles:
        twin = by_key.setdefault((role.kind, role.layer, role.head), role)
        if twin is not role:
            names = f"{twin.value.name} and {role.value.name}"
            raise Refusal(f"inputs {names} look like the same thing ({role.kind})")
    kinds = {role.kind for role in roles}
    if not kinds & {"ids", "embeds"}:
        raise Refusal(f"no input holds token ids; inputs are {_names(inputs)}")
    if not {"key", "value"} <= kinds:
        raise Refusal(
            f"no inputs hold the past keys and values; inputs are {_names(inputs)}. Export it with "
            "past_key_values as inputs"
        )
    _check_layers(roles)
    return roles


def cache_name(name: str) -> tuple[Literal["key", "value"], int, int | None] | None:
    """Return kind, layer and head from the name of a cache input or output, or None."""
    stem = re.sub(r"^past_?key_?values?(?=\W|_|$)", "kv", name.lower())
    tokens = re.findall(r"[a-z]+|\d+", stem)
    numbers: list[int] = []
    head = None
    for before, token in zip(["", *tokens], tokens, strict=False):
        if token.isdigit() and before in _HEAD:
            head = int(token)
        elif token.isdigit():
            numbers.append(int(token))
    if not numbers:
        return None
    words = set(tokens)
    if words & _KEY:
        return "key", numbers[0], head
    if words & _VALUE:
        return "value", numbers[0], head
    if words & {"kv", "past", "present"}:  # a flat tuple: key, value, key, value ...
        return ("value" if numbers[0] % 2 else "key"), numbers[0] // 2, head
    return None


def _role(value: ir.Value) -> Role:
    name = str(value.name).lower()
    rank = len(value.shape) if value.shape is not None else 0
    dtype = value.dtype
    if dtype is None or not rank:
        raise Refusal(f"input {value.name} has no type or no rank")
    integral = dtype in {ir.DataType.INT32, ir.DataType.INT64}
    words = set(re.findall(r"[a-z]+", name))
    cache = cache_name(name) if rank >= 3 and not integral else None
    if words & {"mask", "bias"}:
        return Role("mask", value)
    if cache is not None:
        return Role(cache[0], value, cache[1], cache[2])
    if words & {"cos", "cosine"}:
        return Role("cos", value)
    if words & {"sin", "sine"}:
        return Role("sin", value)
    if words & {"position", "positions", "pos"} and integral:
        return Role("positions", value)
    if integral and rank <= 2:
        return Role("ids", value)
    if rank == 3 and not integral:
        return Role("embeds", value)
    raise Refusal(f"input {value.name} ({dtype.name} {value.shape}) has no role in a decoder")


def _check_layers(roles: list[Role]) -> None:
    for kind in ("key", "value"):
        layers = sorted({role.layer for role in roles if role.kind == kind})
        if layers != list(range(len(layers))):
            raise Refusal(f"there are {kind} caches for layers {layers}, others are missing")
    keys, values = (
        {(r.layer, r.head) for r in roles if r.kind == kind} for kind in ("key", "value")
    )
    odd = keys ^ values
    if odd:
        raise Refusal(f"layer {min(layer for layer, _ in odd)} has not both key and value caches")


def _names(values: list[ir.Value]) -> str:
    names = [str(value.name) for value in values]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
