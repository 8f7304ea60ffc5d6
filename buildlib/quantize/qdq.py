"""QDQ models, whose inputs and outputs are the integers that Genie feeds.

Each activation `t` becomes `t_real` -> QuantizeLinear -> `t` -> DequantizeLinear -> `t_dq`, so the
integers carry the name that the float value had. Weights become integers in a file beside the
model.

The operators of QNN HTP take activations of one width (its FullyConnected of 8 and 16 bits fails to
compile with error 1002). An operator computes with 16 bits if one of its activations has them;
those of 8 bits are converted before it, and results of 8 bits after it, each on the same range. The
QNN provider of ONNX Runtime makes each pair of DequantizeLinear and QuantizeLinear that stands
between two operators a Convert (onnxruntime pull requests 19511 and 22205).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir

from buildlib.encodings.files import load_encodings
from buildlib.encodings.grid import Grid, activation_grid
from buildlib.encodings.model import Encoding, Encodings, asymmetric_encoding
from buildlib.graph.files import load_model, tensor_array
from buildlib.graph.values import infer_shapes, is_parameter, is_real, remove_unused, source_of
from buildlib.passes.base import ENCODINGS_SUFFIX, FLOAT, SORTED, STATIC, Condition, Pass
from buildlib.quantize.grids import activation_grids, parameter_uses
from buildlib.quantize.recipe import value_range
from buildlib.quantize.rewriter import QdqRewriter
from buildlib.quantize.structure import LAYOUT_OPS
from buildlib.quantize.weight_file import SharedWeights, WeightFile, WeightStore

_WIDE = 16
_NARROW = 8
_FLOAT = ir.DataType.FLOAT
_MATRICES = {"Gemm", "MatMul", "Conv"}
_OPSET = 21  # the first with 16-bit QuantizeLinear in the standard domain


def apply_encodings(
    model_path: Path, encodings: Encodings, out_path: Path, weights: Path | None = None
) -> Path:
    """Write a float model, or part of one, as QDQ.

    Args:
        model_path: the float model.
        encodings: encodings of its values.
        out_path: destination of the QDQ model.
        weights: file written by `quantize_weights`, linked beside the model; without it the
            weights go to `{out stem}.weights`.

    Raises:
        EncodingsError: encodings are missing, contradict each other or the model, cannot be built,
            or are not those that `weights` was made with.
        ModelFileError: `weights` is not whole; or the model is quantized already, or float values
            would remain.
    """
    if weights is not None:
        return QdqPass(encodings, SharedWeights(weights)).run(model_path, out_path)
    with WeightFile(out_path.with_suffix(".weights")) as file:
        return QdqPass(encodings, file, file.finish).run(model_path, out_path)


def quantize_weights(model_path: Path, file: Path, encodings: Encodings | None = None) -> Path:
    """Write the integer weights of a part, for `apply_encodings` at every (AR, CL) of it.

    Args:
        model_path: the float part, at any (AR, CL).
        file: destination; its index stands beside it.
        encodings: encodings of the part; by default from the file beside it.
    """
    if encodings is None:
        encodings = load_encodings(model_path.with_suffix(ENCODINGS_SUFFIX))
    model = load_model(model_path)
    with WeightFile(file) as weights:
        quantization = QdqPass(encodings, weights, lambda: weights.finish(index=True))
        quantization.transform(model)
    return file


class QdqPass(Pass):
    """Pass that puts every float value of a model on the grid of its encoding.

    Args:
        encodings: encodings of the model's values.
        weights: source or destination of the integer weights.
        finish: called after all weights, before the model is written.
    """

    name = "qdq"
    carries_encodings = False  # they become part of the graph

    def __init__(
        self,
        encodings: Encodings,
        weights: WeightStore,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.requires = (
            SORTED,
            STATIC,
            FLOAT,
            Condition(f"its opset is {_OPSET} or later", _too_old),
        )
        self.ensures = (
            SORTED,
            STATIC,
            Condition("every value computed is stored as integers", _still_real),
        )
        self.encodings = encodings.by_name()
        self.weights = weights
        self.finish = finish

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        encodings = dict(self.encodings)
        grids = activation_grids(model.graph, encodings)
        transposed = rewrite_block_gemms(model.graph, encodings, grids)
        convert_widths(model.graph, encodings, grids)
        uses = parameter_uses(model.graph, encodings, grids, transposed)
        work = QdqRewriter(model.graph, grids, self.weights)
        work.quantize_parameters(uses)
        work.quantize_activations()
        remove_unused(model.graph)
        self.finish()
        infer_shapes(model)
        return model


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


def rewrite_block_gemms(
    graph: ir.Graph, encodings: dict[str, Encoding], grids: dict[str, Grid]
) -> set[ir.Node]:
    """Replace each Gemm with weights in blocks by a MatMul, and an Add if it has a bias.

    The QNN provider fuses a MatMul with LPBQ weights of shape [in, out]. It does not fuse a Gemm,
    and compiles one with a bias to other numbers (seen with QNN 2.51).

    Args:
        graph: float graph; changed in place.
        encodings: encodings by name; biases without one of 8 or 16 bits get one.
        grids: grids of activations; new products get one.

    Returns:
        The MatMuls whose weight is still [out, in], to be stored transposed.
    """
    transposed: set[ir.Node] = set()
    for node in list(graph):
        if node.op_type == "Gemm" and _has_block_weights(node, encodings):
            product = _gemm_to_matmul(graph, node, encodings, grids)
            if node.attributes.get_int("transB", 0):
                transposed.add(product)
    return transposed


def _has_block_weights(node: ir.Node, encodings: Mapping[str, Encoding]) -> bool:
    weight = node.inputs[1]
    encoding = None if weight is None else encodings.get(str(source_of(weight).name))
    scaled = any(node.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
    plain = not scaled and not node.attributes.get_int("transA", 0)
    return plain and encoding is not None and encoding.block_size is not None


def _gemm_to_matmul(
    graph: ir.Graph, node: ir.Node, encodings: dict[str, Encoding], grids: dict[str, Grid]
) -> ir.Node:
    data, weight = node.inputs[:2]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    end = node.outputs[0]
    name = str(end.name)
    output = ir.Value(name=name, type=end.type, shape=end.shape)
    made = output
    if bias is not None:
        made = ir.Value(name=f"{name}_product", type=end.type, shape=end.shape)
    nodes = [ir.node("MatMul", [data, weight], outputs=[made], name=f"{node.name}_product")]
    if bias is not None:
        nodes.append(ir.node("Add", [made, bias], outputs=[output], name=f"{node.name}_bias"))
        low, high = _bias_range(bias, encodings)
        grids[f"{name}_product"] = _product_grid_of(f"{name}_product", grids[name], low, high)
    end.replace_all_uses_with(output, replace_graph_outputs=True)
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)
    end.name = f"{name}_replaced"
    graph.insert_before(node, nodes)
    graph.remove(node)
    return nodes[0]


def _bias_range(bias: ir.Value, encodings: dict[str, Encoding]) -> tuple[float, float]:
    source = source_of(bias)
    name = str(source.name)
    assert source.const_value is not None  # noqa: S101  (an initializer)
    low, high = value_range(name, tensor_array(source.const_value))
    encoding = encodings.get(name)
    if encoding is None or encoding.dtype != "INT" or encoding.bw > 16:
        encodings[name] = asymmetric_encoding(name, low, high, 16)
    return low, high


def _product_grid_of(name: str, grid: Grid, low: float, high: float) -> Grid:
    """Return the grid of values that lie on `grid` once [low, high] is added."""
    bottom, top = ((limit - grid.zero_point[0]) * grid.scale[0] for limit in grid.limits)
    return activation_grid(asymmetric_encoding(name, bottom - high, top - low, grid.bits))


def convert_widths(graph: ir.Graph, encodings: dict[str, Encoding], grids: dict[str, Grid]) -> None:
    """Insert an Identity, in place, where a value changes to a grid of other bits.

    Args:
        graph: float graph.
        encodings: by name; small constants of operators that compute with 16 bits get 16.
        grids: of activations; converted values are added.
    """
    converted: dict[str, ir.Value] = {}
    for node in list(graph):
        if node.op_type in LAYOUT_OPS or not _is_wide(node, grids):
            continue
        for index, value in enumerate(node.inputs):
            if value is None or not is_real(value) or (node.op_type == "MatMul" and index == 1):
                continue  # of keys and values, which have 8 bits
            name = str(value.name)
            if is_parameter(value):
                source = str(source_of(value).name)
                if _is_narrow_constant(encodings.get(source)) and node.op_type not in _MATRICES:
                    encodings[source] = _widened_encoding(encodings[source])
                continue
            if name in grids and grids[name].bits == _NARROW:
                if name not in converted:
                    converted[name] = _convert(graph, node, value, grids)
                node.replace_input_with(index, converted[name])
        for output in node.outputs:
            name = str(output.name)
            if name in grids and grids[name].bits == _NARROW:
                _convert_output(graph, node, output, grids)


def _is_wide(node: ir.Node, grids: Mapping[str, Grid]) -> bool:
    names = [str(v.name) for v in (*node.inputs, *node.outputs) if v is not None]
    bits = {grids[name].bits for name in names if name in grids}
    return bits == {_NARROW, _WIDE}


def _is_narrow_constant(encoding: Encoding | None) -> bool:
    return encoding is not None and (encoding.dtype, encoding.enc_type, encoding.bw) == (
        "INT", "PER_TENSOR", _NARROW,
    )  # fmt: skip


def _widened_encoding(encoding: Encoding) -> Encoding:
    low, high = _range(activation_grid(encoding))
    return asymmetric_encoding(encoding.name, low, high, _WIDE)


def _range(grid: Grid) -> tuple[float, float]:
    low, high = ((limit - grid.zero_point[0]) * grid.scale[0] for limit in grid.limits)
    return low, high


def _wide_grid(name: str, grid: Grid) -> Grid:
    return activation_grid(asymmetric_encoding(name, *_range(grid), _WIDE))


def _convert(graph: ir.Graph, node: ir.Node, value: ir.Value, grids: dict[str, Grid]) -> ir.Value:
    name = f"{value.name}_as_uint16"
    output = ir.Value(name=name, type=ir.TensorType(_FLOAT), shape=value.shape)
    graph.insert_before(node, ir.node("Identity", [value], outputs=[output], name=name))
    grids[name] = _wide_grid(name, grids[str(value.name)])
    return output


def _convert_output(
    graph: ir.Graph, node: ir.Node, value: ir.Value, grids: dict[str, Grid]
) -> None:
    name = str(value.name)
    wide = f"{name}_wide"
    output = ir.Value(name=name, type=ir.TensorType(_FLOAT), shape=value.shape)
    value.replace_all_uses_with(output, replace_graph_outputs=True)
    value.name = wide
    graph.insert_after(
        node, ir.node("Identity", [value], outputs=[output], name=f"{name}_as_uint8")
    )
    grids[wide] = _wide_grid(wide, grids[name])
