"""Linear modules of every decoder layer, found by their work and not by their names.

Caches tell layers apart. Of layer i: k and v make `past_key_{i}_out` and `past_value_{i}_out`; q is
multiplied with the keys; o takes the output of attention; up to the next layer follow gate (the
one that goes into an activation), up, and down (which takes their product). Where one matrix makes
all of q, k and v, or gate and up, it goes by its fused name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from buildlib.graph import interface
from buildlib.graph.values import is_linear, is_parameter, operand, source_of, static_shape
from buildlib.quantize.techniques.base import Factors
from plugins.lora.peft import Matrix

_ACTIVATIONS = frozenset({"Sigmoid", "Gelu", "Erf", "Tanh", "Relu", "Swish", "HardSwish"})

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "W_pack": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules that are one matrix in some checkpoints; in a graph they may be several, row by row."""


@dataclass(frozen=True)
class Projection:
    """One linear module: `output` [AR, n_out] of `node` for the input [AR, n_in]."""

    node: ir.Node
    n_in: int
    n_out: int

    @property
    def input(self) -> ir.Value:
        """The projected value."""
        return operand(self.node, 0)

    @property
    def output(self) -> ir.Value:
        """The result, bias included."""
        return self.node.outputs[0]

    def factors(self, factors: Factors) -> tuple[Matrix, Matrix]:
        """Return the factors [n_in] and [n_out] of a weight among those of constants by name."""
        shape = (self.n_out, self.n_in) if _is_transposed(self.node) else (self.n_in, self.n_out)
        name = str(source_of(operand(self.node, 1)).name)
        whole = np.broadcast_to(factors.get(name, np.ones(1)), shape)
        of_inputs, of_outputs = whole[0], whole[:, 0] / whole[0, 0]
        if not _is_transposed(self.node):
            of_inputs, of_outputs = whole[:, 0], whole[0] / whole[0, 0]
        return of_inputs.astype(np.float32), of_outputs.astype(np.float32)


def find_projections(model: ir.Model) -> dict[int, dict[str, Projection]]:
    """Return projections by layer and Hugging Face name, as far as a module's place shows it."""
    return _Finder(model).find()


class _Finder:
    def __init__(self, model: ir.Model) -> None:
        self._inputs = {str(value.name): value for value in model.graph.inputs}
        self._outputs = {str(value.name): value for value in model.graph.outputs}
        self._order = {node: index for index, node in enumerate(model.graph)}

    def find(self) -> dict[int, dict[str, Projection]]:
        layers = sorted(
            layer
            for name in self._inputs
            if name.startswith("past_key") and (layer := interface.kv_layer(name)) is not None
        )
        attention = {layer: self._attention(layer) for layer in layers}
        projections: dict[int, dict[str, Projection]] = {}
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            nodes = dict(attention[layer])
            begin, end = nodes.get("o_proj"), self._end(attention, following)
            if begin is not None and end is not None:
                nodes |= self._mlp(begin, end)
            projections[layer] = {name: _projection(node) for name, node in nodes.items()}
        return projections

    def _attention(self, layer: int) -> dict[str, ir.Node]:
        key = self._upstream(self._outputs.get(interface.past_key(layer, "out")))
        value = self._upstream(self._outputs.get(interface.past_value(layer, "out")))
        past_key = self._inputs[interface.past_key(layer, "in")]
        past_value = self._inputs.get(interface.past_value(layer, "in"))
        scores = self._downstream(past_key, lambda node: node.op_type == "MatMul")
        query = None if scores is None else self._upstream(scores.inputs[0])
        out = None if past_value is None else self._downstream(past_value, is_linear)
        nodes = {"q_proj": query, "k_proj": key, "v_proj": value, "o_proj": out}
        if query is key is value:
            nodes = {"qkv_proj": key, "o_proj": out}
        return {name: node for name, node in nodes.items() if node is not None}

    def _end(
        self, attention: Mapping[int, Mapping[str, ir.Node]], following: int | None
    ) -> ir.Value | None:
        """Return the value that a layer's last one flows into: the next layer's, or the logits."""
        if following is not None:
            nodes = attention[following]
            node = nodes.get("q_proj") or nodes.get("qkv_proj")
            return None if node is None else node.inputs[0]
        logits = self._outputs.get(interface.LOGITS)
        if logits is None:  # a part that ends between layers
            rest = [value for name, value in self._outputs.items() if not interface.is_kv(name)]
            return rest[0] if len(rest) == 1 else None
        head = self._upstream(logits)
        return None if head is None else head.inputs[0]

    def _mlp(self, attention: ir.Node, end: ir.Value) -> dict[str, ir.Node]:
        """Return the linear modules on the way from attention's output to `end`."""
        values = {attention.outputs[0]}
        linear: list[ir.Node] = []
        between = self._between(attention, end)
        for node in sorted(between, key=self._order.__getitem__):
            if any(value in values for value in node.inputs):
                values.update(node.outputs)
                if is_linear(node):
                    linear.append(node)
        if len(linear) == 2:
            return dict(zip(("gate_up_proj", "down_proj"), linear, strict=True))
        if len(linear) != 3:
            return {}
        *first, down = linear
        gates = [node for node in first if _is_activated(node)]
        if len(gates) != 1:
            return {}
        (gate,) = gates
        (up,) = (node for node in first if node is not gate)
        return {"gate_proj": gate, "up_proj": up, "down_proj": down}

    def _upstream(self, value: ir.Value | None) -> ir.Node | None:
        while value is not None:
            node = value.producer()
            if node is None or is_linear(node):
                return node
            computed = [v for v in node.inputs if v is not None and self._is_computed(v)]
            value = computed[0] if computed else None
        return None

    def _downstream(self, value: ir.Value, fits: Callable[[ir.Node], bool]) -> ir.Node | None:
        """Return the first node below `value`, in the graph's order, that fits."""
        values = {value}
        for node in self._order:
            if any(value in values for value in node.inputs):
                if fits(node):
                    return node
                values.update(node.outputs)
        return None

    def _between(self, begin: ir.Node, end: ir.Value) -> set[ir.Node]:
        nodes: set[ir.Node] = set()
        todo = [end]
        while todo:
            node = todo.pop().producer()
            if node is not None and node not in nodes and self._order[node] > self._order[begin]:
                nodes.add(node)
                todo += [value for value in node.inputs if value is not None]
        return nodes

    def _is_computed(self, value: ir.Value) -> bool:
        return not is_parameter(value) and value.producer() is not None


def _is_activated(node: ir.Node) -> bool:
    return any(use.node.op_type in _ACTIVATIONS for use in node.outputs[0].uses())


def _projection(node: ir.Node) -> Projection:
    shape = static_shape(source_of(operand(node, 1)))
    assert shape is not None  # noqa: S101  (a linear node)
    n_in, n_out = shape[::-1] if _is_transposed(node) else shape
    return Projection(node, n_in, n_out)


def _is_transposed(node: ir.Node) -> bool:
    return node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
