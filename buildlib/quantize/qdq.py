"""Encodings made visible: a QDQ model whose inputs and outputs are the integers Genie feeds.

Each activation `t` becomes `t_real` -> QuantizeLinear -> `t` -> DequantizeLinear -> `t_dq`, so that
the integers carry the name that the float value had. Weights become integers in a file beside the
model.
"""

from pathlib import Path

import onnx_ir as ir

from buildlib.encodings.model import Encodings
from buildlib.errors import EncodingsError
from buildlib.graph.infer import infer_shapes
from buildlib.passes.base import SORTED, STATIC, Condition, Pass
from buildlib.quantize.grid import Grid, activation_grid, weight_grid
from buildlib.quantize.layout import is_parameter, is_real, moved_inputs, source_of
from buildlib.quantize.rewrite import QdqRewriter
from buildlib.quantize.weight_file import WeightFile

_OPSET = 21  # the first with 16-bit QuantizeLinear in the standard domain


def apply_encodings(model_path: Path, encodings: Encodings, out_path: Path) -> Path:
    """Write the float model, or part of one, as QDQ; its weights go to `{out stem}.weights`.

    Raises:
        EncodingsError: an encoding is missing or cannot be built.
        PassError: the model is quantized already, or float values would remain.
    """
    with WeightFile(out_path.with_suffix(".weights")) as weights:
        return Quantization(encodings, weights).run(model_path, out_path)


class Quantization(Pass):
    """Puts every float value of a model on the grid that the encodings give it."""

    name = "qdq"
    carries_encodings = False  # they become part of the graph

    def __init__(self, encodings: Encodings, weights: WeightFile) -> None:
        self.requires = (
            SORTED,
            STATIC,
            Condition("it is a float model", _quantized),
            Condition(f"its opset is {_OPSET} or later", _too_old),
        )
        self.ensures = (
            SORTED,
            STATIC,
            Condition("every value computed is stored as integers", _still_real),
        )
        self.encodings = encodings
        self.weights = weights

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        grids = activation_grids(model.graph, self.encodings)
        work = QdqRewriter(model.graph, grids, self.weights)
        work.quantize_biases(self._weight_grids())
        work.quantize_parameters(self._weight_grids())
        work.quantize_activations()
        _remove_unused(model.graph)
        self.weights.finish()
        infer_shapes(model)
        return model

    def _weight_grids(self) -> dict[str, Grid]:
        return {e.name: weight_grid(e) for e in self.encodings.param_encodings if e.dtype == "INT"}


def activation_grids(graph: ir.Graph, encodings: Encodings) -> dict[str, Grid]:
    """A grid for every float activation; what moves values inherits where a file says nothing.

    Raises:
        EncodingsError: no encoding, and nothing to inherit from.
    """
    given = {e.name: e for e in encodings.activation_encodings}
    params = {e.name: e for e in encodings.param_encodings}
    grids = {
        name: activation_grid(given[name])
        for name in _activations(graph)
        if name in given and given[name].dtype == "INT"
    }
    nodes = list(graph)
    for node in (*nodes, *reversed(nodes), *nodes):
        for output in node.outputs:
            sources = [str(source_of(value).name) for value in moved_inputs(node)]
            grid = next((grids[name] for name in sources if name in grids), None)
            if grid is None and sources and sources[0] in params:
                grid = activation_grid(params[sources[0]])
            if grid is not None and is_real(output):
                grids.setdefault(str(output.name), grid)
            if str(output.name) in grids:
                for value in moved_inputs(node):
                    if not is_parameter(value) and is_real(value):
                        grids.setdefault(str(value.name), grids[str(output.name)])
    for name in _activations(graph):
        if name not in grids:
            raise EncodingsError(name, "the model has this value, the file no encoding for it")
    return grids


def _activations(graph: ir.Graph) -> list[str]:
    values = (*graph.inputs, *(value for node in graph for value in node.outputs))
    return [str(v.name) for v in values if is_real(v) and not is_parameter(v)]


def _remove_unused(graph: ir.Graph) -> None:
    """Drop casts and initializers that quantized weights have replaced."""
    for node in reversed(list(graph)):
        if not any(v.uses() or v in graph.outputs for v in node.outputs):
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
            graph.remove(node)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]


def _quantized(model: ir.Model) -> str | None:
    for node in model.graph:
        if node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
            return f"it has {node.op_type} {node.name}"
    return None


def _too_old(model: ir.Model) -> str | None:
    opset = model.graph.opset_imports.get("", 0)
    return None if opset >= _OPSET else f"it is {opset}"


def _still_real(model: ir.Model) -> str | None:
    for value in (*model.graph.inputs, *model.graph.outputs):
        if is_real(value):
            return f"{value.name} is {value.dtype}"
    for node in model.graph:
        for value in node.outputs:
            if not is_real(value) or node.op_type == "DequantizeLinear":
                continue
            if any(use.node.op_type != "QuantizeLinear" for use in value.uses()):
                return f"{value.name} is used as {value.dtype}"
    return None
