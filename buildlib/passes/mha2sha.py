"""Pass that turns multi-head attention into single-head attention, head by head.

The NPU runs many small matrix products without batch axes better than one with them. Weights stored
by output channel are sliced by reference; the caches keep their shapes outside.

Operators on all heads at once become operators on one head each. Heads begin where a projection
[AR, N] is reshaped to [AR, n_kv, group, head_dim], or where a cache [n_kv, 1, ..] is read. They end
where the heads of a token are put side by side again. Every operator between treats heads alike, so
it is repeated for each of them: no pattern of an attention is matched, and scales, norms and
rotations may stand anywhere.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of, inherit, set_encoding
from buildlib.graph import interface
from buildlib.graph.files import tensor_array
from buildlib.graph.values import (
    infer_shapes,
    operand,
    remove_unused,
    static_shape,
    tensor_value,
)
from buildlib.passes.base import FLOAT, SORTED, STATIC, Condition, Pass, PreconditionError
from buildlib.passes.projection_slices import ProjectionSlicer, constant_integers

_PIECE = re.compile(r"(.+)_(?:head_(\d+)|columns_(\d+)_\d+)")
Attribute = int | float | str | list[int]

Axes = tuple[int, int]
"""Axes of a rank-4 value that count key/value heads, and query heads sharing one."""

HEADS_FIRST: Axes = (0, 1)
TOKENS_FIRST: Axes = (1, 2)
_ELEMENTWISE = (
    "Abs", "Add", "Cast", "Clip", "Div", "Erf", "Exp", "Gelu", "Identity", "Log", "Max", "Min",
    "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh",
    "Where",
)  # fmt: skip


def whole_name(name: str) -> tuple[str, int | None]:
    """Return the value of the model that has a piece, and the head or column where it begins.

    The pass calls pieces `layer_0_scores_head_2` and `layer_0_q_proj_columns_24_48`. All other
    values are whole, and begin nowhere.
    """
    piece = _PIECE.fullmatch(name)
    return (piece[1], int(piece[2] or piece[3])) if piece else (name, None)


def convert_mha2sha(model_path: Path, out_path: Path) -> Path:
    """Write a float model, or part of one, with a separate attention for every head.

    A part without attention, or with one head only, is written unchanged.

    Raises:
        ModelFileError: an operator of the attention mixes heads, or head counts do not divide.
        EncodingsError: a weight's encoding does not fit its channels.
    """
    return Mha2Sha().run(model_path, out_path)


def _many_headed(model: ir.Model) -> str | None:
    for node in model.graph:
        dims = static_shape(node.outputs[0]) if node.op_type == "Softmax" else None
        if dims is not None and any(dim != 1 for dim in dims[:-2]):
            return f"{node.name} is over {list(dims)}"
    return None


class Mha2Sha(Pass):
    """Repeats the operators between projections and their reunion for each head."""

    name = "mha2sha"
    requires = (SORTED, STATIC, FLOAT)
    ensures = (SORTED, STATIC, Condition("every attention is of one head", _many_headed))

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        if any(value.shape is None for node in model.graph for value in node.outputs):
            infer_shapes(model)
        if _many_headed(model) is None:
            return model
        HeadSplitter(model.graph).split()
        remove_unused(model.graph)
        return model


@dataclass
class Heads:
    """The heads of one value.

    Attributes:
        whole: the value.
        replicas: one for each head, those that share keys and values side by side; in each the head
            axes have size 1.
        group: query heads for each key/value head; 1 for keys and values themselves.
        axes: the head axes of `whole`.
        stored: the head axes of the replicas, which have the other axes in the same order. None for
            replicas [AR, x] that have no head axes yet. Moving an axis of size 1 moves no numbers:
            it is left until an operator needs it.
    """

    whole: ir.Value
    replicas: list[ir.Value]
    group: int
    axes: Axes
    stored: Axes | None

    @property
    def n_kv(self) -> int:
        """Key/value heads."""
        return len(self.replicas) // self.group

    def at(self, kv: int, query: int) -> ir.Value:
        """Return the replica for query head `query` of key/value head `kv`."""
        return self.replicas[kv * self.group + query if self.group > 1 else kv]

    def materialize(self, maker: "HeadSplitter") -> "Heads":
        """Give the replicas the axes of `whole`."""
        if self.stored != self.axes:
            outputs = _new_replicas(self.whole, self.axes, len(self.replicas))
            for value, output in zip(self.replicas, outputs, strict=True):
                self._rearrange(value, output, maker)
            self.replicas, self.stored = outputs, self.axes
        return self

    def _rearrange(self, value: ir.Value, output: ir.Value, maker: "HeadSplitter") -> None:
        if self.stored is None:
            target = [1 if axis in self.axes else -1 for axis in range(4)]
            target[-1] = (static_shape(value) or (0,))[-1]
            maker.make("Reshape", [value, maker.constant(target)], [output])
        else:
            others = iter(axis for axis in range(4) if axis not in self.stored)
            sources = dict(zip(self.axes, self.stored, strict=True))
            perm = [sources[axis] if axis in sources else next(others) for axis in range(4)]
            maker.make("Transpose", [value], [output], perm=perm)


def _new_replicas(whole: ir.Value, axes: Axes, count: int) -> list[ir.Value]:
    """Make values for the heads of `whole`, equal except for their names, with its encoding."""
    dims, encoding = static_shape(whole), encoding_of(whole)
    shape = None
    if dims is not None:
        shape = ir.Shape(1 if axis in axes else dim for axis, dim in enumerate(dims))
        shape.freeze()  # one object for all
    names = (f"{whole.name}_head_{head}" for head in range(count))
    values = [ir.Value(name=name, type=whole.type, shape=shape) for name in names]
    for value in values:
        set_encoding(value, encoding)
    return values


class HeadSplitter:
    """Splits one graph by head, in place.

    Attributes:
        heads: heads of every value that was split.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.heads: dict[ir.Value, Heads] = {}
        self._projections = ProjectionSlicer(graph)
        self._node = next(iter(graph))

    def split(self) -> None:
        """Repeat every operator between projections and outputs for each head.

        Raises:
            PreconditionError: an operator mixes heads, or heads of queries do not divide by those
                of keys.
        """
        for node in list(self.graph):
            self._node = node
            if self._splits_heads(node):
                self._split_projection(node)
            elif not any(value is not None and self._has_heads(value) for value in node.inputs):
                continue
            elif node.op_type == "Reshape":
                self._merge_heads(node)
            elif node.op_type == "Transpose":
                self._transpose(node)
            elif node.op_type in _AXES and not node.domain:
                self._repeat_for_heads(node, _AXES[node.op_type](node))
            else:
                raise PreconditionError(f"{_label(node)} cannot be split by head")
        for index, value in enumerate(self.graph.outputs):
            if value in self.heads:
                self.graph.outputs[index] = self._merged_output(self.heads[value].materialize(self))

    def make(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        **attributes: Attribute,
    ) -> None:
        """Add a node before the one that is being repeated."""
        node = ir.node(op_type, inputs, attributes, outputs=outputs, name=outputs[0].name)
        self.graph.insert_before(self._node, node)

    def constant(self, numbers: Sequence[int]) -> ir.Value:
        """Return an int64 initializer, shared by all users of equal numbers."""
        name = "head_" + "_".join("ar" if number < 0 else str(number) for number in numbers)
        if name not in self.graph.initializers:
            self._register(name, np.array(numbers, dtype=np.int64))
        return self.graph.initializers[name]

    def _register(self, name: str, array: npt.NDArray[Any]) -> ir.Value:
        value = tensor_value(ir.Tensor(array, name=name), name)
        self.graph.register_initializer(value)
        return value

    # --- where heads begin ---

    def _splits_heads(self, node: ir.Node) -> bool:
        if node.op_type != "Reshape" or node.inputs[0] is None or node.inputs[0] in self.heads:
            return False
        target = constant_integers(node.inputs[1])
        dims = static_shape(node.inputs[0]) or (0,)
        return len(target) == 4 and target[0] == -1 and np.prod(target[1:]) == dims[-1]

    def _split_projection(self, node: ir.Node) -> None:
        flat, whole = operand(node, 0), node.outputs[0]
        _, n_kv, group, _ = constant_integers(node.inputs[1])
        pieces = self._projections.slice_columns(flat, n_kv * group, node)
        self.heads[whole] = Heads(whole, pieces, group, TOKENS_FIRST, stored=None)

    def _has_heads(self, value: ir.Value) -> bool:
        return value in self.heads or (value.is_graph_input() and interface.is_kv(str(value.name)))

    def _materialized(self, value: ir.Value) -> Heads:
        """Return the heads of a value as an operator reads them; split those of a cache."""
        if value not in self.heads:
            dims = static_shape(value)
            if dims is None or len(dims) != 4 or dims[1] != 1:
                raise PreconditionError(
                    f"cache {value.name} is {list(dims or ())}, not [n_kv, 1, .., ..]"
                )
            replicas = [value]
            if dims[0] > 1:
                replicas = _new_replicas(value, HEADS_FIRST, dims[0])
                self.make("Split", [value], replicas, axis=0, num_outputs=dims[0])
            self.heads[value] = Heads(value, replicas, 1, HEADS_FIRST, stored=HEADS_FIRST)
        return self.heads[value].materialize(self)

    # --- between ---

    def _repeat_for_heads(self, node: ir.Node, axes: Iterable[int] = ()) -> None:
        """Repeat a node for each head; the `axes` that it works across must not count heads."""
        operands = {
            value: self._materialized(value)
            for value in node.inputs
            if value is not None and self._has_heads(value)
        }
        loose = [value for value in node.inputs if value is not None and value not in operands]
        if node.op_type == "Concat" and loose:
            reason = f"joins heads with {loose[0].name}, which has none"
            raise PreconditionError(f"{_label(node)} {reason}")
        first = next(iter(operands.values()))
        group = max(heads.group for heads in operands.values())
        for heads in operands.values():
            if heads.n_kv != first.n_kv or heads.group not in {1, group}:
                raise PreconditionError(
                    f"{_label(node)} joins {heads.n_kv * heads.group} heads with "
                    f"{first.n_kv * first.group}: the head count does not divide"
                )
            if heads.axes != first.axes:
                raise PreconditionError(
                    f"{_label(node)} joins values whose heads lie on other axes"
                )
        if any(axis % 4 in first.axes for axis in axes):
            raise PreconditionError(f"{_label(node)} works across heads")
        for value in node.outputs:
            replicas = _new_replicas(value, first.axes, first.n_kv * group)
            self.heads[value] = Heads(value, replicas, group, first.axes, stored=first.axes)
        for head in range(first.n_kv * group):
            kv, query = divmod(head, group)
            inputs = [
                operands[value].at(kv, query)
                if value in operands
                else self._operand_of_head(value, first, kv, query)
                for value in node.inputs
            ]
            outputs = [self.heads[value].replicas[head] for value in node.outputs]
            again = ir.Node(
                "", node.op_type, inputs, node.attributes, outputs=outputs, name=outputs[0].name
            )
            self.graph.insert_before(node, again)

    def _operand_of_head(
        self, value: ir.Value | None, heads: Heads, kv: int, query: int
    ) -> ir.Value | None:
        """Return an operand without heads, or the slice of a constant for one head."""
        if value is None:
            return None
        dims = static_shape(value)
        if dims is None:
            raise PreconditionError(f"{value.name} has no static shape")
        places = [axis - 4 + len(dims) for axis in heads.axes]
        indices = {
            place: index
            for place, index in zip(places, (kv, query), strict=True)
            if place >= 0 and dims[place] != 1
        }
        if not indices or len(dims) > 4:
            return value
        if value.const_value is None:
            raise PreconditionError(f"{value.name} {list(dims)} differs from head to head")
        name = f"{value.name}_head_{kv}_{query}"
        if name not in self.graph.initializers:
            array = tensor_array(value.const_value)
            for place, index in indices.items():
                array = array.take([index], axis=place)
            inherit(self._register(name, array), value)
        return self.graph.initializers[name]

    def _transpose(self, node: ir.Node) -> None:
        value, whole = operand(node, 0), node.outputs[0]
        perm = node.attributes.get_ints("perm", ())
        if len(perm) != 4:
            raise PreconditionError(f"{_label(node)} has no order of four axes")
        source = self.heads.get(value) or self._materialized(value)
        axes = (perm.index(source.axes[0]), perm.index(source.axes[1]))
        others = [axis for axis in perm if axis not in source.axes]
        if others == sorted(others) and axes in {HEADS_FIRST, TOKENS_FIRST}:
            self.heads[whole] = Heads(whole, source.replicas, source.group, axes, source.stored)
            return
        self._repeat_for_heads(node)
        self.heads[whole].axes = self.heads[whole].stored = axes

    # --- where they end ---

    def _merge_heads(self, node: ir.Node) -> None:
        """Reshape from [AR, n_kv, group, x] back to tokens."""
        value, target = operand(node, 0), constant_integers(node.inputs[1])
        heads = self.heads.get(value) or self._materialized(value)
        dims = static_shape(heads.replicas[0]) or (0,)
        width = heads.n_kv * heads.group * dims[-1]
        if heads.axes != TOKENS_FIRST or target[-1:] != [width]:
            raise PreconditionError(f"{_label(node)} reshapes heads to {target}")
        node.replace_input_with(0, self._concatenated(heads, dims, width))

    def _concatenated(self, heads: Heads, dims: tuple[int, ...], width: int) -> ir.Value:
        replicas = heads.replicas
        if len(replicas) == 1:
            return replicas[0]
        whole = heads.whole
        output = ir.Value(
            name=f"{whole.name}_heads", type=whole.type, shape=ir.Shape((*dims[:-1], width))
        )
        self.make("Concat", replicas, [inherit(output, whole)], axis=-1)
        return output

    def _merged_output(self, heads: Heads) -> ir.Value:
        """Put an output of the graph together again under its name."""
        whole = heads.whole
        if heads.axes != HEADS_FIRST or heads.group != 1:
            raise PreconditionError(f"output {whole.name} is no cache of key/value heads")
        name, whole.name = whole.name, f"{whole.name}_whole"
        if heads.n_kv == 1:
            heads.replicas[0].name = name
            return heads.replicas[0]
        output = inherit(ir.Value(name=name, type=whole.type, shape=whole.shape), whole)
        node = ir.node("Concat", heads.replicas, {"axis": 0}, outputs=[output], name=name)
        self.graph.append(node)
        return output


def _to_the_last_axis(node: ir.Node) -> Iterable[int]:
    return range(node.attributes.get_int("axis", -1) % 4, 4)


def _reduced_axes(node: ir.Node) -> Iterable[int]:
    axes = constant_integers(node.inputs[1] if len(node.inputs) > 1 else None)
    if not axes or node.attributes.get_int("keepdims", 1) != 1:
        raise PreconditionError(f"{_label(node)} does away with the heads")
    return axes


def _sliced_axes(node: ir.Node) -> Iterable[int]:
    return constant_integers(node.inputs[3] if len(node.inputs) > 3 else None) or [0]


_AXES: dict[str, Callable[[ir.Node], Iterable[int]]] = {
    **dict.fromkeys(_ELEMENTWISE, lambda _: ()),
    **dict.fromkeys(("Concat", "Split"), lambda node: [node.attributes.get_int("axis", 0)]),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _to_the_last_axis),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceSum"), _reduced_axes),
    "MatMul": lambda _: (2, 3),
    "Slice": _sliced_axes,
    "Softmax": lambda node: [node.attributes.get_int("axis", -1)],
}
"""Axes that an operator on four axes works across."""


def _label(node: ir.Node) -> str:
    return f"{node.op_type} {node.name or node.outputs[0].name}"
