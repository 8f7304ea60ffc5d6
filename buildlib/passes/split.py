"""Split of a model into parts at layer boundaries, so that a device can load context binaries.

Parts are balanced by the time that they take to compile. A separate embedding or output projection
counts as a part.

Borders of layers are found in the graph, not by names of nodes. They are values on every path from
the input to the logits: before a layer, the last that depends on no cache of that layer; before the
head, the sum that ends the last layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of
from buildlib.errors import ModelFileError
from buildlib.graph import interface
from buildlib.graph.values import static_shape
from buildlib.passes.balance import ModelWeights, SplitEnds, balance_layers
from buildlib.passes.base import (
    SORTED,
    STATIC,
    Condition,
    PreconditionError,
    check_conditions,
    load_with_encodings,
    save_with_encodings,
)

_NAME = "split"
_SOURCES = (interface.INPUT_IDS, interface.INPUTS_EMBEDS)


@dataclass(frozen=True)
class Segments:
    """A whole model in segments, counted from 0: embedding, each layer, head.

    Attributes:
        borders: `borders[i]` leads into segment i + 1.
        members: the nodes of each segment in order; nodes that depend on neither tokens nor caches
            (masks, tables, casts of weights) are in none.
        outputs: the model's outputs that each segment makes.
    """

    borders: tuple[ir.Value, ...]
    members: tuple[tuple[ir.Node, ...], ...]
    outputs: tuple[tuple[ir.Value, ...], ...]

    @property
    def n_layers(self) -> int:
        """Decoder layers."""
        return len(self.members) - 2

    def weights(self) -> ModelWeights:
        """Return the bytes of weights in each segment, as encoded, else as stored."""
        sizes = [
            {
                str(stored.name): _n_bytes(stored)
                for node in nodes
                for value in node.inputs
                if value is not None and (stored := _stored(value)).is_initializer()
            }
            for nodes in self.members
        ]
        return ModelWeights(sizes[0], tuple(sizes[1:-1]), sizes[-1])


def split_model(
    model_path: Path,
    n_splits: int,
    out_dir: Path,
    *,
    split_embedding: bool = False,
    split_lm_head: bool = False,
) -> list[Path]:
    """Write `ar{AR}_cl{CL}_{k}_of_{n}.onnx`, `n_splits` in all; float or quantized.

    Args:
        model_path: a whole model at one (AR, CL).
        n_splits: parts in all, with those of the next two.
        out_dir: gets the parts, their encodings, and links to the weights.
        split_embedding: whether the first part is only the embedding.
        split_lm_head: whether the last part is only the final norm and the output projection.

    Raises:
        ModelFileError: it is not a whole model, or more than one value connects two layers.
        InvalidOptionError: more parts than layers.
    """
    model, segments = load_segments(model_path)
    apart = SplitEnds(embedding=split_embedding, head=split_lm_head)
    for splits_off, segment, reason in (
        (split_embedding, 0, "embedding to split off: it takes embeddings"),
        (split_lm_head, -1, "output projection to split off: no sum ends the last layer"),
    ):
        if splits_off and not segments.members[segment]:
            raise ModelFileError(model_path, f"pass {_NAME}, precondition: there is no {reason}")
    layers = balance_layers(segments.weights(), n_splits, apart)
    shape = interface.model_shape(model)
    paths = []
    for number, part in enumerate(_segment_ranges(layers, segments.n_layers), 1):
        extracted = extract_segments(model, segments, part)
        extracted.graph.name = f"{model.graph.name}_part_{number}_of_{n_splits}"
        check_conditions(_NAME, "postcondition", (SORTED, STATIC), extracted, model_path)
        paths.append(
            save_with_encodings(extracted, out_dir / f"{shape}_{number}_of_{n_splits}.onnx")
        )
    return paths


def weights_by_segment(model_path: Path) -> ModelWeights:
    """Return the weights of a whole model by segment, for `choose_splits`."""
    _model, segments = load_segments(model_path)
    return segments.weights()


def load_segments(
    model_path: Path, change: Callable[[ir.Model], object] | None = None
) -> tuple[ir.Model, Segments]:
    """Load a whole model at one (AR, CL), with its encodings if there are any, and cut it.

    Args:
        model_path: the model.
        change: changes it first, such as `ArClConversion(shape).transform`.
    """
    model = load_with_encodings(model_path)
    check_conditions(_NAME, "precondition", (SORTED, STATIC, _HAS_MASK), model, model_path)
    try:
        if change is not None:
            change(model)
        return model, _find_segments(model)
    except PreconditionError as error:
        raise ModelFileError(model_path, f"pass {_NAME}, precondition: {error}") from error


def _segment_ranges(layers: list[range], n_layers: int) -> list[range]:
    """Return the segments of each part: ends go with the outermost layers unless separate."""
    runs = []
    for index, part in enumerate(layers):
        start, stop = part.start + 1, part.stop + 1
        if index == 0:
            start = 0
        if index == len(layers) - 1:
            stop = n_layers + 2
        runs.append(range(start, stop))
    return runs


def extract_segments(model: ir.Model, segments: Segments, part: range) -> ir.Model:
    """Copy some segments into a model of their own; values keep their names and encodings.

    Its inputs are the border before it, if any, and those of the model that its nodes read; its
    outputs the border after it, if any, and those of the model that it makes.
    """
    first = segments.borders[part.start - 1] if part.start else None
    members = {node for index in part for node in segments.members[index]}
    outputs = [value for index in part for value in segments.outputs[index]]
    outputs.sort(key=lambda value: not interface.is_kv(str(value.name)))
    if part.stop < len(segments.members):
        outputs.insert(0, segments.borders[part.stop - 1])
    nodes = _with_constants(model.graph, members, first)
    operands = {value for node in nodes for value in node.inputs}
    inputs = [] if first is None else [first]
    inputs += [value for value in model.graph.inputs if value in operands - {first}]
    return extract_nodes(model, nodes, inputs, outputs)


def extract_nodes(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
) -> ir.Model:
    """Copy nodes into a model of their own; values keep their names and encodings.

    Args:
        model: that has the nodes; its constants come along by reference.
        nodes: in order.
        inputs: all values that the nodes read and do not make, but constants.
        outputs: of the nodes.
    """
    operands = {value for node in nodes for value in node.inputs if value is not None}
    constants = [value for value in model.graph.initializers.values() if value in operands]
    view = ir.GraphView(
        inputs,
        outputs,
        nodes=nodes,
        initializers=constants,
        opset_imports=model.graph.opset_imports,
    )
    result = ir.Model(
        view.clone(),
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        functions=list(model.functions.values()),
    )
    result.meta.update(model.meta)
    return result


def _with_constants(
    graph: ir.Graph, members: set[ir.Node], first: ir.Value | None
) -> list[ir.Node]:
    """Return the nodes of a part in order, with the nodes that they need and no segment has."""
    nodes = set(members)
    todo = [value for node in members for value in node.inputs if value is not None]
    while todo:
        value = todo.pop()
        node = value.producer()
        if node is None or node in nodes or value is first:
            continue
        nodes.add(node)
        todo += [value for value in node.inputs if value is not None]
    return [node for node in graph if node in nodes]


def _missing_mask(model: ir.Model) -> str | None:
    return "it has none to tell AR and CL from" if interface.model_shape(model) is None else None


_HAS_MASK = Condition("it has an attention mask", _missing_mask)


def _find_segments(model: ir.Model) -> Segments:
    """Return the segments of a whole model."""
    graph = model.graph
    layers = _layers(graph)
    borders = _borders(graph, layers)
    place = {value: 0 for value in graph.inputs if value.name in _SOURCES}
    for value in graph.inputs:
        layer = interface.kv_layer(str(value.name))
        if layer is not None:
            place[value] = layers.index(layer) + 1
    entry = {value: index + 1 for index, value in enumerate(borders)}
    place |= {value: entry[value] for value in graph.inputs if value in entry}
    members: list[list[ir.Node]] = [[] for _ in range(len(layers) + 2)]
    origin: dict[ir.Value, int] = {}
    for node in graph:
        places = {place[value]: value for value in node.inputs if value in place}
        if not places:
            continue
        first, here = min(places), max(places)
        if first != here:
            ends = f"{_segment_name(first, layers)} and {_segment_name(here, layers)}"
            reason = f"more than one value connects {ends}: {places[first].name}"
            raise PreconditionError(reason)
        members[here].append(node)
        for value in node.outputs:
            origin[value] = here
            place[value] = entry.get(value, here)
    outputs: list[list[ir.Value]] = [[] for _ in members]
    for value in graph.outputs:
        outputs[origin.get(value, 0)].append(value)
    return Segments(borders, tuple(map(tuple, members)), tuple(map(tuple, outputs)))


def _segment_name(segment: int, layers: list[int]) -> str:
    if segment == 0:
        return "the embedding"
    return f"layer {layers[segment - 1]}" if segment <= len(layers) else "the head"


def _layers(graph: ir.Graph) -> list[int]:
    layers = {interface.kv_layer(str(value.name)) for value in graph.inputs} - {None}
    if not layers:
        raise PreconditionError("no layer has a key/value cache")
    return sorted(layer for layer in layers if layer is not None)


def _borders(graph: ir.Graph, layers: list[int]) -> tuple[ir.Value, ...]:
    source = next((value for value in graph.inputs if value.name in _SOURCES), None)
    sink = next((value for value in graph.outputs if value.name == interface.LOGITS), None)
    if source is None or sink is None:
        raise PreconditionError(f"{_SOURCES[0] if source is None else interface.LOGITS} is missing")
    chain = _dominator_chain(source, sink)
    if not chain:
        raise PreconditionError(f"{sink.name} does not depend on {source.name}")
    last_layers = _last_layers(graph)
    ends = {
        last_layers.get(value, -1): value
        for value in chain
        if _maker_type(value) != "DequantizeLinear"
    }
    ends[layers[-1]] = _last_sum(chain, static_shape(ends[-1])) or ends.get(layers[-1], sink)
    for index, before in enumerate((-1, *layers)):
        if last_layers.get(ends.get(before, source), -1) != before:
            here, there = _segment_name(index, layers), _segment_name(index + 1, layers)
            raise PreconditionError(f"no single value connects {here} and {there}")
    return tuple(ends[layer] for layer in (-1, *layers))


def _last_layers(graph: ir.Graph) -> dict[ir.Value, int]:
    """Return the last layer whose caches each value depends on."""
    last_layers = {
        value: layer
        for value in graph.inputs
        if (layer := interface.kv_layer(str(value.name))) is not None
    }
    for node in graph:
        last = max(
            (last_layers[value] for value in node.inputs if value in last_layers), default=None
        )
        if last is not None:
            last_layers.update((value, last) for value in node.outputs)
    return last_layers


def _last_sum(chain: list[ir.Value], dims: tuple[int, ...] | None) -> ir.Value | None:
    """Return the last value of the chain that is a sum of two activations, as stored."""
    for index in range(len(chain) - 1, 0, -1):
        node = chain[index].producer()
        if node is None or node.op_type != "Add" or static_shape(chain[index]) != dims:
            continue
        if not any(value is None or _stored(value).is_initializer() for value in node.inputs):
            following = chain[index + 1 : index + 2]
            if following and _maker_type(following[0]) == "QuantizeLinear":
                return following[0]
            return chain[index]
    return None


def _stored(value: ir.Value) -> ir.Value:
    """Return the value that `value` is cast or dequantized from, or itself."""
    node = value.producer()
    while node is not None and node.op_type in {"Cast", "DequantizeLinear"} and node.inputs[0]:
        value = node.inputs[0]
        node = value.producer()
    return value


def _maker_type(value: ir.Value) -> str | None:
    node = value.producer()
    return node.op_type if node is not None else None


def _n_bytes(weight: ir.Value) -> int:
    tensor, encoding = weight.const_value, encoding_of(weight)
    if tensor is None:
        return 0
    bits = None if encoding is None else encoding.stored_bits
    return int(tensor.nbytes) if bits is None else (int(tensor.size) * bits + 7) // 8


def _dominator_chain(source: ir.Value, sink: ir.Value) -> list[ir.Value]:
    """Return the values on all paths from `source` to `sink`, in order, both included.

    Only what depends on `source` counts as a path; masks, caches and constants do not. Cooper,
    Harvey, Kennedy, "A Simple, Fast Dominance Algorithm", on a graph without cycles.
    """
    parent: dict[ir.Value, ir.Value] = {source: source}
    depth = {source: 0}
    graph = source.graph
    assert graph is not None  # noqa: S101  (a value of a graph)
    for node in graph:
        operands = [value for value in node.inputs if value is not None and value in parent]
        if not operands:
            continue
        meeting = operands[0]
        for other in operands[1:]:
            meeting = _meet(meeting, other, parent, depth)
        for output in node.outputs:
            parent[output] = meeting
            depth[output] = depth[meeting] + 1
    if sink not in parent:
        return []
    chain = [sink]
    while chain[-1] is not source:
        chain.append(parent[chain[-1]])
    return chain[::-1]


def _meet(
    first: ir.Value,
    second: ir.Value,
    parent: dict[ir.Value, ir.Value],
    depth: dict[ir.Value, int],
) -> ir.Value:
    while first is not second:
        if depth[first] < depth[second]:
            first, second = second, first
        first = parent[first]
    return first
