"""Spellings of other tools: imported to the same values, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

from buildlib.encodings.files import load_encodings
from buildlib.errors import ModelFileError
from buildlib.graph import interface
from buildlib.graph.shape import GraphShape
from buildlib.quantize.weight_grids import lpbq_encoding, per_channel_encoding
from tests.buildlib.onnx_models import assert_near, random_feeds, run_once

Change = Callable[[onnx.ModelProto], None]
ImportChanged = Callable[..., Path]

SHAPE = GraphShape(4, 16)
_SYMBOLIC, _FED = "dynamo-llama", "aihub-llama-mha-fixed"


def before(name: str, op_type: str, *constants: npt.NDArray[Any], **attributes: int) -> Change:
    """Put an operator between a value, its first input, and all that read the value."""

    def change(model: onnx.ModelProto) -> None:
        names = [f"{name}_constant_{index}" for index in range(len(constants))]
        for node in model.graph.node:
            node.input[:] = [f"{name}_changed" if value == name else value for value in node.input]
        operator = helper.make_node(op_type, [name, *names], [f"{name}_changed"])
        operator.attribute.extend(helper.make_attribute(*pair) for pair in attributes.items())
        model.graph.node.insert(0, operator)
        tensors = map(numpy_helper.from_array, constants, names)
        model.graph.initializer.extend(tensors)

    return change


def after(name: str, *operators: onnx.NodeProto) -> Change:
    """Put operators behind an output; they read `original` and make the output."""

    def change(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.output[:] = ["original" if output == name else output for output in node.output]
        model.graph.node.extend(operators)

    return change


def weights_as_constants(model: onnx.ModelProto) -> None:
    held = list(model.graph.initializer)
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in held]
    nodes += model.graph.node
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)


def nodes_backwards(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


@pytest.mark.parametrize("name", [_SYMBOLIC, "torchscript-qwen2", "notebook-llama-mha"])
def test_spelling_changes_nothing(name: str, import_changed: ImportChanged) -> None:
    plain = import_changed(name, SHAPE)
    other = import_changed(name, SHAPE, weights_as_constants, nodes_backwards)
    assert_near(run_once(other), run_once(plain), tolerance=0)


def test_a_constant_weight_must_be_numbers(import_changed: ImportChanged) -> None:
    def broken(model: onnx.ModelProto) -> None:
        weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
        array = numpy_helper.to_array(weight).copy()
        array[0, 0] = np.nan
        weight.CopyFrom(numpy_helper.from_array(array, weight.name))

    with pytest.raises(ModelFileError, match="not finite"):
        import_changed(_SYMBOLIC, SHAPE, broken, weights_as_constants)


# --- half precision ---


@pytest.mark.parametrize(
    ("name", "keep_io"),
    [(_SYMBOLIC, True), ("torchscript-qwen3", False), (_FED, True), (_FED, False)],
)
def test_a_float16_export_gets_no_scales_from_rounding(
    name: str, keep_io: bool, import_changed: ImportChanged
) -> None:
    def half(model: onnx.ModelProto) -> None:
        options = {"keep_io_types": keep_io, "min_positive_val": 1e-7}
        model.CopyFrom(convert_float_to_float16(model, **options))

    path, plain = import_changed(name, SHAPE, half), import_changed(name, SHAPE)
    assert _operators(path) == _operators(plain)
    assert_near(run_once(path), run_once(plain), tolerance=1e-2)


def test_a_bfloat16_export_is_read_as_coarsely_as_it_was_computed(
    import_changed: ImportChanged,
) -> None:
    def bfloat16(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.data_type == TensorProto.FLOAT:
                tensor.CopyFrom(_bfloat16(tensor))
        for value in (*model.graph.input, *model.graph.output):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT:
                value.type.tensor_type.elem_type = TensorProto.BFLOAT16
        del model.graph.value_info[:]
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                    attribute.i = TensorProto.BFLOAT16
                if attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT:
                    attribute.t.CopyFrom(_bfloat16(attribute.t))

    path, plain = import_changed(_FED, SHAPE, bfloat16), import_changed(_FED, SHAPE)
    assert _operators(path) == _operators(plain)
    assert_near(run_once(path), run_once(plain), tolerance=5e-2)


def _bfloat16(tensor: onnx.TensorProto) -> onnx.TensorProto:
    rounded = numpy_helper.to_array(tensor).astype(ir.DataType.BFLOAT16.numpy())
    return ir.to_proto(ir.tensor(rounded, name=tensor.name))


def _operators(path: Path) -> list[str]:
    """What a model computes with; weights of another type are cast before."""
    return [node.op_type for node in ir.load(path).graph if node.op_type != "Cast"]


# --- encodings ---

_FILE = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)


@pytest.mark.parametrize(
    ("operator", "attributes", "stored", "axis"),
    [
        ("Cast", {"to": TensorProto.FLOAT}, _FILE.T.astype(np.float16), 1),
        ("Transpose", {"perm": [1, 0]}, _FILE, 0),
        ("Identity", {}, _FILE.T, 1),
        ("Squeeze", {}, _FILE.T[None], 1),
    ],
)
@pytest.mark.parametrize("kind", ["per_channel", "lpbq"])
def test_an_encoding_of_what_is_made_of_a_weight_is_the_weights(
    operator: str,
    attributes: dict[str, Any],
    stored: npt.NDArray[Any],
    axis: int,
    kind: str,
    import_changed: ImportChanged,
) -> None:
    """The operator sees [in, out]; the file keeps it as it likes, and so does the encoding."""

    def view(model: onnx.ModelProto) -> None:
        product = next(node for node in model.graph.node if node.output[0] == "logits")
        array = np.ascontiguousarray(stored)
        model.graph.initializer.append(numpy_helper.from_array(array, "file"))
        node = helper.make_node(operator, ["file"], ["view_of_file"], **attributes)
        model.graph.node.insert(0, node)
        product.input[1] = "view_of_file"

    grid = lpbq_encoding("view_of_file", _FILE.T, 1, 16)
    if kind == "per_channel":
        grid = per_channel_encoding("view_of_file", _FILE.T, 1, 4)
    path = import_changed(_SYMBOLIC, SHAPE, view, encoding=grid)
    (encoding,) = load_encodings(path.with_suffix(".encodings")).param_encodings
    blocks = None if grid.block_axis is None else 1 - axis
    assert encoding == grid.model_copy(update={"name": "file", "axis": axis, "block_axis": blocks})


# --- what an import must not read over ---


def vocabulary_in_another_order(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([32, 32]), "halves"))
    split = helper.make_node("Split", ["original", "halves"], ["low", "high"], axis=2)
    after("logits", split, helper.make_node("Concat", ["high", "low"], ["logits"], axis=2))(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (vocabulary_in_another_order, "output logits does not hold the scores of the vocabulary"),
        (
            before("input_ids", "Cast", to=TensorProto.UINT8),
            "Cast .* turns an activation into UINT8",
        ),
    ],
)
def test_changes_of_the_result_are_refused(
    change: Change, reason: str, import_changed: ImportChanged
) -> None:
    with pytest.raises(ModelFileError, match=reason):
        import_changed(_SYMBOLIC, SHAPE, change)


def test_operators_mean_what_their_opset_says(import_changed: ImportChanged) -> None:
    def softmax_of_old(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = 12
        for node in model.graph.node:
            if node.op_type == "Softmax":
                del node.attribute[:]

    def too_old(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = 6

    with pytest.raises(ModelFileError, match=r"Softmax .* axis 1 and all behind it"):
        import_changed(_FED, SHAPE, softmax_of_old)
    with pytest.raises(ModelFileError, match="opset 6; the oldest"):
        import_changed(_FED, SHAPE, too_old)


def tables_exchanged(model: onnx.ModelProto) -> None:
    names = {"position_ids_cos": "position_ids_sin", "position_ids_sin": "position_ids_cos"}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


@pytest.mark.parametrize(
    ("name", "change"),
    [(_FED, tables_exchanged), ("notebook-llama-mha", before("position_ids_sin", "Neg"))],
)
def test_heads_turn_by_the_tables_that_a_host_feeds(
    name: str, change: Change, import_changed: ImportChanged
) -> None:
    with pytest.raises(ModelFileError, match="otherwise than by the cosines and sines"):
        import_changed(name, SHAPE, change)


@pytest.mark.parametrize(
    "change",
    [before("attention_mask", "Neg"), before("attention_mask", "Mul", np.zeros((), np.float32))],
)
def test_a_mask_is_followed_at_one_token_too(change: Change, import_changed: ImportChanged) -> None:
    """One token sees all of a full past: that tells a mask from none only where slots are free."""

    def decoding(model: onnx.ModelProto) -> None:
        for value in model.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_value = {"s43": 1, "s54": 16}.get(dim.dim_param, 15)

    with pytest.raises(ModelFileError, match="not the causal one"):
        import_changed("aihub-llama", GraphShape(1, 16), change, decoding)


WINDOW = 6


def test_the_mask_of_a_sliding_window_is_made_from_the_one_that_is_fed(
    import_changed: ImportChanged,
) -> None:
    """The export hides by a constant all before the window of a token, of a past that is full."""
    distance = (SHAPE.past + np.arange(SHAPE.ar))[:, None] - np.arange(SHAPE.cl)
    hidden = np.where(distance >= WINDOW, -100.0, 0.0).astype(np.float32)[None, None]
    windowed = import_changed(_FED, SHAPE, before("attention_mask", "Min", hidden))
    whole = import_changed(_FED, SHAPE)
    feeds = random_feeds(whole)
    mask = np.zeros((1, 1, SHAPE.ar, SHAPE.cl), np.float32)
    mask[..., SHAPE.past :][..., *np.triu_indices(SHAPE.ar, 1)] = interface.MASKED
    near = np.where(distance >= WINDOW, interface.MASKED, mask).astype(np.float32)
    one = run_once(windowed, feeds | {interface.ATTENTION_MASK: mask})
    other = run_once(whole, feeds | {interface.ATTENTION_MASK: near})
    np.testing.assert_allclose(one["logits"], other["logits"], rtol=0, atol=1e-5)


def test_an_export_without_caches_says_what_to_export(import_changed: ImportChanged) -> None:
    def without_caches(model: onnx.ModelProto) -> None:
        for value in [value for value in model.graph.input if "past" in value.name]:
            model.graph.input.remove(value)
            empty = np.zeros((1, 2, 0, 8), np.float32)
            model.graph.initializer.append(numpy_helper.from_array(empty, value.name))

    with pytest.raises(ModelFileError, match="past_key_values as inputs"):
        import_changed(_SYMBOLIC, SHAPE, without_caches)


def test_features_are_scaled_before_a_convolution(import_changed: ImportChanged) -> None:
    """Factors lie along the axis of channels, and go with them to the last one."""
    factors = np.linspace(0.5, 1.5, 32, dtype=np.float32)

    def scaled_weight(model: onnx.ModelProto) -> None:
        conv = next(node for node in model.graph.node if node.op_type == "Conv")
        weight = next(one for one in model.graph.initializer if one.name == conv.input[1])
        array = numpy_helper.to_array(weight) * factors[:, None, None]
        weight.CopyFrom(numpy_helper.from_array(array, weight.name))

    def scaled_input(model: onnx.ModelProto) -> None:
        conv = next(node for node in model.graph.node if node.op_type == "Conv")
        place = list(model.graph.node).index(conv)
        array = factors[None, :, None, None]
        model.graph.initializer.append(numpy_helper.from_array(array, "factors"))
        node = helper.make_node("Mul", [conv.input[0], "factors"], ["scaled_input"])
        conv.input[0] = "scaled_input"
        model.graph.node.insert(place, node)

    one, other = (
        import_changed("aihub-llama", SHAPE, way) for way in (scaled_weight, scaled_input)
    )
    assert_near(run_once(other), run_once(one))
