"""Cut a model into parts at layer boundaries, for context binaries that a device can load.

A boundary is found in the graph, not by names of nodes: the last value that every path from
`input_ids` to `logits` passes after the caches of one layer have been read, and before those of the
next.
"""

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from buildlib.encodings.attached import inherit
from buildlib.errors import PassError
from buildlib.graph import interface
from buildlib.graph.files import load_model
from buildlib.passes.base import SORTED, STATIC, Condition, Pass
from buildlib.passes.dominators import dominator_chain


def split_model(model_path: Path, n_splits: int, out_dir: Path) -> list[Path]:
    """Write `ar{AR}_cl{CL}_{k}_of_{n}.onnx`, layers spread evenly; float or quantized.

    Raises:
        ModelFileError: it is no sound model.
        PassError: more parts than layers, or layers that more than one value connects.
    """
    shape = interface.model_shape(load_model(model_path))
    return [
        ExtractPart(part, n_splits).run(
            model_path, out_dir / f"{shape}_{part + 1}_of_{n_splits}.onnx"
        )
        for part in range(n_splits)
    ]


@dataclass(frozen=True)
class Cut:
    """One part: everything needed for `outputs`, from `inputs` on."""

    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    nodes: tuple[ir.Node, ...]


class ExtractPart(Pass):
    """Keeps part `part` (from 0) of `n_splits`."""

    name = "split"
    ensures = (SORTED, STATIC)

    def __init__(self, part: int, n_splits: int) -> None:
        self.part = part
        self.n_splits = n_splits
        self.requires = (
            SORTED,
            STATIC,
            Condition("it is a whole model", _partial),
            Condition(f"it has {n_splits} parts", lambda model: _too_few(model, n_splits)),
        )

    def transform(self, model: ir.Model) -> ir.Model:
        """A new model of this part alone; values keep their names."""
        cut = find_cuts(model, self.n_splits)[self.part]
        keep = set(cut.nodes)
        inputs = [_as_input(value) for value in cut.inputs]
        graph = model.graph
        graph.outputs[:] = cut.outputs
        for node in reversed(list(graph)):
            if node not in keep:
                _detach(node, graph)
        graph.inputs[:] = inputs
        for name, value in list(graph.initializers.items()):
            if not value.uses():
                del graph.initializers[name]
        graph.name = f"{graph.name}_part_{self.part + 1}_of_{self.n_splits}"
        return model


def find_cuts(model: ir.Model, n_splits: int) -> list[Cut]:
    """The parts of a whole model.

    Raises:
        PassError: no single value lies between two layers.
    """
    by_name = {str(value.name): value for value in model.graph.inputs}
    outputs = {str(value.name): value for value in model.graph.outputs}
    chain = dominator_chain(by_name[interface.INPUT_IDS], outputs[interface.LOGITS])
    layers = _layers(model)
    readers = {layer: _descendants(model, layer) for layer in layers}
    firsts = [layers[len(layers) * part // n_splits] for part in range(n_splits)]
    hidden: list[ir.Value] = []
    for first in firsts[1:]:
        before = readers[layers[layers.index(first) - 1]]
        between = [value for value in chain if value in before and value not in readers[first]]
        between = [value for value in between if not _is_dequantized(value)]
        if not between:
            reason = f"no single value connects layers {first - 1} and {first}"
            raise PassError("split", "precondition", Path(str(model.graph.name)), reason)
        hidden.append(between[-1])
    return [_cut(model, part, firsts, hidden) for part in range(n_splits)]


def _cut(model: ir.Model, part: int, firsts: list[int], hidden: list[ir.Value]) -> Cut:
    last = part == len(firsts) - 1
    end = firsts[part + 1] if not last else None
    outputs = [
        value
        for value in model.graph.outputs
        if (layer := interface.kv_layer(str(value.name))) is not None
        and firsts[part] <= layer
        and (end is None or layer < end)
    ]
    outputs += [
        value for value in model.graph.outputs if last and not interface.is_kv(str(value.name))
    ]
    if not last:
        outputs.insert(0, hidden[part])
    stop = {hidden[part - 1]} if part else set()
    nodes = _ancestors(outputs, stop)
    used = {value for node in nodes for value in node.inputs if value is not None}
    inputs = [value for value in model.graph.inputs if value in used]
    return Cut((*stop, *inputs), tuple(outputs), tuple(nodes))


def _ancestors(values: list[ir.Value], stop: set[ir.Value]) -> list[ir.Node]:
    found: set[ir.Node] = set()
    todo = [value for value in values if value not in stop]
    while todo:
        node = todo.pop().producer()
        if node is None or node in found:
            continue
        found.add(node)
        todo += [value for value in node.inputs if value is not None and value not in stop]
    return list(found)


def _descendants(model: ir.Model, layer: int) -> set[ir.Value]:
    """Everything that depends on the caches of `layer`."""
    found = {value for value in model.graph.inputs if interface.kv_layer(str(value.name)) == layer}
    for node in model.graph:
        if any(value in found for value in node.inputs):
            found.update(node.outputs)
    return found


def _layers(model: ir.Model) -> list[int]:
    layers = {interface.kv_layer(str(value.name)) for value in model.graph.inputs}
    return sorted(layer for layer in layers if layer is not None)


def _is_dequantized(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def _as_input(value: ir.Value) -> ir.Value:
    """A graph input in the place of `value`, which may be one already."""
    if value.producer() is None:
        return value
    twin = ir.Value(name=value.name, type=value.type, shape=value.shape)
    value.replace_all_uses_with(twin)
    return inherit(twin, value)


def _detach(node: ir.Node, graph: ir.Graph) -> None:
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)
    graph.remove(node)


def _partial(model: ir.Model) -> str | None:
    names = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    missing = {interface.INPUT_IDS, interface.LOGITS} - names
    return f"{min(missing)} is missing" if missing else None


def _too_few(model: ir.Model, n_splits: int) -> str | None:
    n_layers = len(_layers(model))
    return None if 1 <= n_splits <= n_layers else f"{n_splits} parts of {n_layers} layers"
