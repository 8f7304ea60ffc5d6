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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of, inherit, set_encoding
from buildlib.graph import interface
from buildlib.graph.files import tensor_array
from buildlib.graph.values import infer_shapes, remove_unused, static_shape
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

_ALONG_ONE_AXIS = ("Concat", "Softmax", "Split")
_TO_THE_LAST_AXIS = ("LayerNormalization", "RMSNormalization")
_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceSum")


def whole_name(name: str) -> tuple[str, int | None]:
    """Return of which value of the model a piece is, and where it begins: at a head or a column.

    The pass calls pieces `layer_0_scores_head_2` and `layer_0_q_proj_columns_24_48`. All other
    values are whole, and begin nowhere.
    """
    piece = _PIECE.fullmatch(name)
    return (piece[1], int(piece[2] or piece[3])) if piece else (name, None)


def convert_mha2sha(model_path: Path, out_path: Path) -> Path:
    """Write a float model, or part of one, with a separate attention for every head.

    A part without attention, or with one head only, is written unchanged.

    Raises:
        ModelFileError: it is not a sound model; or an operator of the attention mixes heads, or
            head counts do not divide.
        EncodingsError: a weight's encoding does not fit its channels.
    """
    return Mha2Sha().run(model_path, out_path)


class Mha2Sha(Pass):
    """Repeats the operators between projections and their reunion for each head."""

    name = "mha2sha"

    def __init__(self) -> None:
        self.requires = (SORTED, STATIC, FLOAT)
        self.ensures = (
            SORTED,
            STATIC,
            Condition("every attention is of one head", _many_headed),
        )

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        if any(value.shape is None for node in model.graph for value in node.outputs):
            infer_shapes(model)
        if _many_headed(model) is None:
            return model
        HeadSplitter(model.graph).split()
        remove_unused(model.graph)
        return model


def _many_headed(model: ir.Model) -> str | None:
    for node in model.graph:
        dims = static_shape(node.outputs[0]) if node.op_type == "Softmax" else None
        if dims is not None and any(dim != 1 for dim in dims[:-2]):
            return f"{node.name} is over {list(dims)}"
    return None


@dataclass
class Heads:
    """The heads of one value.

    Attributes:
        whole: the value they are of.
        grid: [n_kv][group] replicas; in each the head axes have size 1.
        axes: the head axes of `whole`.
        stored: the head axes of the replicas, which have the other axes in the same order. None for
            replicas [AR, x] that have no head axes yet. Moving an axis of size 1 moves no numbers:
            it is left until an operator needs it.
    """

    whole: ir.Value
    grid: list[list[ir.Value]]
    axes: Axes
    stored: Axes | None

    @property
    def n_kv(self) -> int:
        """Key/value heads."""
        return len(self.grid)

    @property
    def group(self) -> int:
        """Query heads for each of them; 1 for keys and values themselves."""
        return len(self.grid[0])

    @property
    def replicas(self) -> list[ir.Value]:
        """All replicas, query heads that share keys and values side by side."""
        return [value for row in self.grid for value in row]

    def at(self, kv: int, query: int) -> ir.Value:
        """Return the replica for query head `query` of key/value head `kv`."""
        return self.grid[kv][query if self.group > 1 else 0]

    def materialize(self, maker: "HeadSplitter") -> "Heads":
        """Give the replicas the axes of `whole`."""
        if self.stored != self.axes:
            replicas = ReplicaFactory(self.whole, self.axes)
            moved = [
                self._rearranged(value, replicas.make(head), maker)
                for head, value in enumerate(self.replicas)
            ]
            starts = range(0, len(moved), self.group)
            self.grid = [moved[start : start + self.group] for start in starts]
            self.stored = self.axes
        return self

    def _rearranged(self, value: ir.Value, output: ir.Value, maker: "HeadSplitter") -> ir.Value:
        if self.stored is None:
            target = [1 if axis in self.axes else -1 for axis in range(4)]
            target[-1] = (static_shape(value) or (0,))[-1]
            maker.make("Reshape", [value, maker.constant(target)], [output])
        else:
            others = iter(axis for axis in range(4) if axis not in self.stored)
            moved = dict(zip(self.axes, self.stored, strict=True))
            perm = [moved[axis] if axis in moved else next(others) for axis in range(4)]
            maker.make("Transpose", [value], [output], perm=perm)
        return output


class ReplicaFactory:
    """Makes values for the heads of `whole`, equal except for their names, with its encoding."""

    def __init__(self, whole: ir.Value, axes: Axes) -> None:
        self._whole = whole
        self._encoding = encoding_of(whole)
        self._shape: ir.Shape | None = None
        dims = static_shape(whole)
        if dims is not None:
            self._shape = ir.Shape(1 if axis in axes else dim for axis, dim in enumerate(dims))
            self._shape.freeze()  # one object for all

    def make(self, head: int) -> ir.Value:
        """Make the value of one head."""
        whole = self._whole
        value = ir.Value(name=f"{whole.name}_head_{head}", type=whole.type, shape=self._shape)
        if self._encoding is not None:
            set_encoding(value, self._encoding)
        return value


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
            elif any(value is not None and self._has_heads(value) for value in node.inputs):
                rule = self._RULES.get(node.op_type)
                if rule is None or node.domain:
                    raise PreconditionError(f"{_label(node)} cannot be split by head")
                rule(self, node)
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
            array = np.array(numbers, dtype=np.int64)
            self._register(ir.tensor(array, name=name), name)
        return self.graph.initializers[name]

    def _register(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor
        )
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
        flat, whole = node.inputs[0], node.outputs[0]
        assert flat is not None  # noqa: S101  (an entrance)
        _, n_kv, group, _ = constant_integers(node.inputs[1])
        pieces = self._projections.slice_columns(flat, n_kv * group, node)
        grid = [pieces[kv * group : (kv + 1) * group] for kv in range(n_kv)]
        self.heads[whole] = Heads(whole, grid, TOKENS_FIRST, stored=None)

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
            maker = ReplicaFactory(value, HEADS_FIRST)
            replicas = [maker.make(head) for head in range(dims[0])]
            if len(replicas) > 1:
                self.make("Split", [value], replicas, axis=0, num_outputs=len(replicas))
            else:
                replicas = [value]
            grid = [[one] for one in replicas]
            self.heads[value] = Heads(value, grid, HEADS_FIRST, stored=HEADS_FIRST)
        return self.heads[value].materialize(self)

    # --- between ---

    def _repeat_for_heads(self, node: ir.Node) -> Axes:
        """Repeat a node for each head; return the axes that it must not work across."""
        taken = {
            value: self._materialized(value)
            for value in node.inputs
            if value is not None and self._has_heads(value)
        }
        first = next(iter(taken.values()))
        group = max(heads.group for heads in taken.values())
        for heads in taken.values():
            if heads.n_kv != first.n_kv or heads.group not in {1, group}:
                raise PreconditionError(
                    f"{_label(node)} joins {heads.n_kv * heads.group} heads with "
                    f"{first.n_kv * first.group}: the head count does not divide"
                )
            if heads.axes != first.axes:
                raise PreconditionError(
                    f"{_label(node)} joins values whose heads lie on other axes"
                )
        makers = [ReplicaFactory(value, first.axes) for value in node.outputs]
        made: list[list[list[ir.Value]]] = [[] for _ in makers]
        for kv in range(first.n_kv):
            for grid in made:
                grid.append([])
            for query in range(group):
                outputs = [maker.make(kv * group + query) for maker in makers]
                inputs = [
                    taken[value].at(kv, query)
                    if value in taken
                    else self._operand_of_head(value, first, kv, query)
                    for value in node.inputs
                ]
                again = ir.Node(
                    "", node.op_type, inputs, node.attributes, outputs=outputs, name=outputs[0].name
                )
                self.graph.insert_before(node, again)
                for grid, output in zip(made, outputs, strict=True):
                    grid[-1].append(output)
        for value, grid in zip(node.outputs, made, strict=True):
            self.heads[value] = Heads(value, grid, first.axes, stored=first.axes)
        return first.axes

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
        wanted = [(place, at) for place, at in zip(places, (kv, query), strict=True) if place >= 0]
        wanted = [(place, at) for place, at in wanted if dims[place] != 1]
        if not wanted or len(dims) > 4:
            return value
        if value.const_value is None:
            raise PreconditionError(f"{value.name} {list(dims)} differs from head to head")
        name = f"{value.name}_head_{kv}_{query}"
        if name not in self.graph.initializers:
            array = tensor_array(value.const_value)
            for place, at in wanted:
                array = array.take([at], axis=place)
            inherit(self._register(ir.tensor(array, name=name), name), value)
        return self.graph.initializers[name]

    def _elementwise(self, node: ir.Node) -> None:
        self._repeat_for_heads(node)

    def _along_axis(self, node: ir.Node) -> None:
        """Repeat Softmax, Concat or Split, whose axis must not count heads."""
        axis = node.attributes.get_int("axis", -1 if node.op_type == "Softmax" else 0)
        if node.op_type == "Concat":
            loose = [v for v in node.inputs if v is not None and not self._has_heads(v)]
            if loose:
                raise PreconditionError(
                    f"{_label(node)} joins heads with {loose[0].name}, which has none"
                )
        self._reject_head_axes(node, self._repeat_for_heads(node), [axis])

    def _normalization(self, node: ir.Node) -> None:
        axis = node.attributes.get_int("axis", -1)
        self._reject_head_axes(node, self._repeat_for_heads(node), list(range(axis % 4, 4)))

    def _reduce(self, node: ir.Node) -> None:
        axes = constant_integers(node.inputs[1] if len(node.inputs) > 1 else None)
        if not axes or node.attributes.get_int("keepdims", 1) != 1:
            raise PreconditionError(f"{_label(node)} does away with the heads")
        self._reject_head_axes(node, self._repeat_for_heads(node), axes)

    def _slice(self, node: ir.Node) -> None:
        axes = constant_integers(node.inputs[3] if len(node.inputs) > 3 else None)
        self._reject_head_axes(node, self._repeat_for_heads(node), axes or [0])

    def _matmul(self, node: ir.Node) -> None:
        self._reject_head_axes(node, self._repeat_for_heads(node), [2, 3])

    def _reject_head_axes(self, node: ir.Node, heads: Axes, touched: list[int]) -> None:
        if any(axis % 4 in heads for axis in touched):
            raise PreconditionError(f"{_label(node)} works across heads")

    def _transpose(self, node: ir.Node) -> None:
        value, whole = node.inputs[0], node.outputs[0]
        assert value is not None  # noqa: S101  (required)
        perm = node.attributes.get_ints("perm", ())
        if len(perm) != 4:
            raise PreconditionError(f"{_label(node)} has no order of four axes")
        source = self.heads.get(value) or self._materialized(value)
        axes = (perm.index(source.axes[0]), perm.index(source.axes[1]))
        others = [axis for axis in perm if axis not in source.axes]
        if others == sorted(others) and axes in {HEADS_FIRST, TOKENS_FIRST}:
            self.heads[whole] = Heads(whole, source.grid, axes, source.stored)
            return
        self._repeat_for_heads(node)
        self.heads[whole].axes = self.heads[whole].stored = axes

    # --- where they end ---

    def _merge_heads(self, node: ir.Node) -> None:
        """Reshape from [AR, n_kv, group, x] back to tokens."""
        value, target = node.inputs[0], constant_integers(node.inputs[1])
        assert value is not None  # noqa: S101  (required)
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

    _RULES: ClassVar[dict[str, Callable[["HeadSplitter", ir.Node], None]]] = {
        **dict.fromkeys(_ELEMENTWISE, _elementwise),
        **dict.fromkeys(_ALONG_ONE_AXIS, _along_axis),
        **dict.fromkeys(_TO_THE_LAST_AXIS, _normalization),
        **dict.fromkeys(_REDUCTIONS, _reduce),
        "MatMul": _matmul,
        "Reshape": _merge_heads,
        "Slice": _slice,
        "Transpose": _transpose,
    }


def _label(node: ir.Node) -> str:
    return f"{node.op_type} {node.name or node.outputs[0].name}"
