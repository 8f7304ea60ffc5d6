"""Split of a model into parts at layer boundaries, so that a device can load context binaries.

Parts are balanced by the time that they take to compile. A separate embedding or output projection
counts as a part.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir

from buildlib.errors import ModelFileError
from buildlib.graph import interface
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
from buildlib.passes.segments import Segments, find_segments

_NAME = "split"


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
        return model, find_segments(model)
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
