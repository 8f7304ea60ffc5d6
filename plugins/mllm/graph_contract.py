"""Pass that gives a whole model the inputs and outputs of mllm's QNN runners.

Source of the contract: https://github.com/UbiquitousLearning/mllm (MIT), `mllm/backends/qnn/aot_rt`
and `examples/qwen3_qnn_aot` at b9c3070. It hands tensors over by their order: `input_ids` int32
[1, AR], `position_ids` int32 [AR], `attention_mask` [1, 1, AR, CL], then for all layers
`past_key_{i}` [1, n_kv, head_dim, CL-AR], for all layers `past_value_{i}` [1, n_kv, CL-AR,
head_dim]; out come `logits` [1, 1, AR, vocab], all `present_key_{i}`, all `present_value_{i}`.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of, inherit, set_encoding
from buildlib.encodings.model import Encoding
from buildlib.graph import interface
from buildlib.graph.values import infer_shapes, static_shape, tensor_value
from buildlib.passes.base import FLOAT, SORTED, STATIC, Condition, Pass
from buildlib.toolchains.base import GraphInfo

Floats = npt.NDArray[np.float32]
MLLM_CONTRACT = "mllm"
"""Its name; see `buildlib.toolchains.qnn.contracts`."""
POSITION_IDS = "position_ids"
_INPUTS = frozenset({interface.INPUT_IDS, interface.ATTENTION_MASK, interface.COS, interface.SIN})

_FIRST = (interface.INPUT_IDS, POSITION_IDS, interface.ATTENTION_MASK, interface.LOGITS)
_UNKNOWN = (3, 0)
_CACHE = re.compile(r"(?:past|present)_(?P<kind>key|value)_(?P<layer>\d+)")


def graph_name(ar: int) -> str:
    """Return the name by which mllm's runners find the graph of an AR."""
    return f"model.0.s{ar}"


def place(name: str) -> tuple[int, int]:
    """Return the sort key of an input or output in mllm's order."""
    cache = _CACHE.fullmatch(name)
    if cache is None:
        return (0, _FIRST.index(name)) if name in _FIRST else _UNKNOWN
    return (1 if cache["kind"] == "key" else 2), int(cache["layer"])


def find_fault(graphs: Sequence[GraphInfo], ar_len: int) -> str | None:
    """Return why mllm's runner could not run compiled graphs, or None if it can.

    Args:
        graphs: of one context binary.
        ar_len: of its prefill calls.
    """
    names = {graph.name for graph in graphs}
    for name in (graph_name(1), graph_name(ar_len)):
        if name not in names:
            return f"it has no graph {name}, but {', '.join(sorted(names))}"
    for graph in graphs:
        for ports in (graph.inputs, graph.outputs):
            places = [place(tensor.name) for tensor in ports]
            if _UNKNOWN in places or places != sorted(places):
                return f"graph {graph.name} does not have mllm's inputs and outputs in mllm's order"
    return None


def _unknown_input(model: ir.Model) -> str | None:
    names = {str(value.name) for value in model.graph.inputs}
    outputs = {str(value.name) for value in model.graph.outputs} - {interface.LOGITS}
    for phrase, candidates in (
        ("takes", (name for name in names - _INPUTS if not interface.is_kv(name))),
        ("does not take", _INPUTS - names),
        ("gives", (name for name in outputs if not interface.is_kv(name))),
    ):
        if (name := min(candidates, default=None)) is not None:
            return f"it {phrase} {name}"
    return None


class MllmContract(Pass):
    """Looks rotations up by position inside of the graph, and reshapes caches and logits.

    Rotations are put onto their grid as Genie 1.21 does, downwards, so that both contracts compute
    the same.

    Args:
        cos: cosines of all positions, those of padding too: [positions, head_dim/2].
        sin: sines of the same.
    """

    name = "mllm contract"
    requires = (
        SORTED,
        STATIC,
        FLOAT,
        Condition("it is whole, with one set of rotations", _unknown_input),
    )
    ensures = (SORTED, STATIC)

    def __init__(self, cos: Floats, sin: Floats) -> None:
        self._tables = {interface.COS: cos, interface.SIN: sin}

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        graph = model.graph
        inputs = {str(value.name): value for value in graph.inputs}
        outputs = list(graph.outputs)
        ar = (static_shape(inputs[interface.INPUT_IDS]) or ())[1]
        positions = _value(POSITION_IDS, (ar,), ir.DataType.INT32)
        head: list[ir.Node] = []
        for name, table in self._tables.items():
            head += _look_up(graph, inputs[name], table, positions)
        ends: list[ir.Value] = [positions]
        for name, value in inputs.items():
            if interface.is_kv(name):
                outer = _renamed(value, name.removesuffix("_in"))
                ends.append(outer)
                head.append(_reshape(graph, outer, _replaced(value)))
            elif name not in self._tables:
                ends.append(value)
        results: list[ir.Value] = []
        for value in outputs:
            name = str(value.name).replace("past", "present").removesuffix("_out")
            if name == interface.LOGITS:
                value.name = f"{name}_by_token"
            results.append(_renamed(value, name))
        tail = [_reshape(graph, *pair) for pair in zip(outputs, results, strict=True)]
        for ports, values in ((graph.inputs, ends), (graph.outputs, results)):
            ports[:] = sorted(values, key=lambda value: place(str(value.name)))
        graph.insert_before(graph[0], head)
        graph.extend(tail)
        infer_shapes(model)
        return model


def _value(name: str, dims: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))


def _renamed(value: ir.Value, name: str) -> ir.Value:
    """Return an input or output in mllm's form: the batch before heads, a row before tokens."""
    dims = static_shape(value) or ()
    turned = (1, dims[0], *dims[2:]) if len(dims) == len("nbtd") else (1, *dims)
    return inherit(_value(name, turned, ir.DataType.FLOAT), value)


def _replaced(value: ir.Value) -> ir.Value:
    """Return a value that takes the place of an input inside of the graph."""
    inner = _value(str(value.name), static_shape(value) or (), ir.DataType.FLOAT)
    value.replace_all_uses_with(inner)
    return inherit(inner, value)


def _reshape(graph: ir.Graph, source: ir.Value, target: ir.Value) -> ir.Node:
    dims = np.array(static_shape(target), dtype=np.int64)
    shape = _constant(graph, f"{target.name}_shape", dims)
    return ir.node("Reshape", [source, shape], outputs=[target], name=f"{target.name}_reshape")


def _look_up(graph: ir.Graph, value: ir.Value, table: Floats, positions: ir.Value) -> list[ir.Node]:
    """Replace an input of rotations, [1, 1, AR, head_dim/2], by rows of a table."""
    name, encoding = str(value.name), encoding_of(value)
    if encoding is not None:
        table = _rounded_down(table, encoding)
    rows = _constant(graph, f"{name}_table", table)
    set_encoding(rows, encoding)
    dims = static_shape(value) or ()
    result = inherit(_value(f"{name}_rows", dims[2:], ir.DataType.FLOAT), value)
    gather = ir.node("Gather", [rows, positions], {"axis": 0}, outputs=[result], name=result.name)
    return [gather, _reshape(graph, result, _replaced(value))]


def _rounded_down(values: Floats, encoding: Encoding) -> Floats:
    scale, offset = encoding.scale[0], encoding.offset[0]
    integers = np.floor(values.astype(np.float64) / scale) - offset
    integers = np.clip(integers, 0, (1 << encoding.bw) - 1)
    return np.asarray((integers + offset) * scale, np.float32)


def _constant(graph: ir.Graph, name: str, array: npt.NDArray[np.int64] | Floats) -> ir.Value:
    graph.initializers[name] = tensor_value(ir.Tensor(array, name=name), name)
    return graph.initializers[name]
