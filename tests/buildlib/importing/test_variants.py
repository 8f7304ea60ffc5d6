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
from buildlib.encodings.model import Encoding
from buildlib.errors import ModelFileError
from buildlib.graph import interface
from buildlib.graph.shape import GraphShape
from buildlib.numerics.runners import OnnxRunner, read_ports
from buildlib.quantize.weight_grids import lpbq_encoding, per_channel_encoding

Change = Callable[[onnx.ModelProto], None]
ImportChanged = Callable[..., Path]
Answers = Callable[[Path], list[npt.NDArray[Any]]]

SHAPE = GraphShape(4, 16)
_SYMBOLIC, _FED = "dynamo-llama", "aihub-llama-mha-fixed"


def nothing(model: onnx.ModelProto) -> None:
    del model


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


@pytest.mark.parametrize("change", [weights_as_constants, nodes_backwards])
@pytest.mark.parametrize("name", [_SYMBOLIC, "torchscript-qwen2", "notebook-llama-mha"])
def test_spelling_changes_nothing(
    name: str, change: Change, import_changed: ImportChanged, answers: Answers
) -> None:
    wanted = answers(import_changed(name, nothing, SHAPE))
    for one, other in zip(answers(import_changed(name, change, SHAPE)), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_cyclic_graph_is_refused(import_changed: ImportChanged) -> None:
    def circle(model: onnx.ModelProto) -> None:
        first = next(node for node in model.graph.node if node.op_type == "Add")
        last = [node for node in model.graph.node if node.op_type == "Add"][-1]
        first.input[0] = last.output[0]

    with pytest.raises(ModelFileError, match="before it is made"):
        import_changed(_SYMBOLIC, circle, SHAPE)


def test_a_constant_weight_must_be_numbers(import_changed: ImportChanged) -> None:
    def broken(model: onnx.ModelProto) -> None:
        weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 2)
        array = numpy_helper.to_array(weight).copy()
        array[0, 0] = np.nan
        weight.CopyFrom(numpy_helper.from_array(array, weight.name))
        weights_as_constants(model)

    with pytest.raises(ModelFileError, match="not finite"):
        import_changed(_SYMBOLIC, broken, SHAPE)


# --- half precision ---


@pytest.mark.parametrize("keep_io", [True, False])
@pytest.mark.parametrize("name", [_SYMBOLIC, "torchscript-qwen3", _FED])
def test_a_float16_export_gets_no_scales_from_rounding(
    name: str, keep_io: bool, import_changed: ImportChanged, answers: Answers
) -> None:
    def half(model: onnx.ModelProto) -> None:
        made = convert_float_to_float16(model, keep_io_types=keep_io, min_positive_val=1e-7)
        model.CopyFrom(made)

    path, plain = import_changed(name, half, SHAPE), import_changed(name, nothing, SHAPE)
    assert _operators(path) == _operators(plain)
    for got, wanted in zip(answers(path), answers(plain), strict=True):
        assert np.abs(got - wanted).max() <= 1e-2 * np.abs(wanted).max()


def test_a_bfloat16_export_is_read_as_coarsely_as_it_was_computed(
    import_changed: ImportChanged, answers: Answers
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

    path, plain = import_changed(_FED, bfloat16, SHAPE), import_changed(_FED, nothing, SHAPE)
    assert _operators(path) == _operators(plain)
    for got, wanted in zip(answers(path), answers(plain), strict=True):
        assert np.abs(got - wanted).max() <= 5e-2 * np.abs(wanted).max()


def _bfloat16(tensor: onnx.TensorProto) -> onnx.TensorProto:
    rounded = numpy_helper.to_array(tensor).astype(ir.DataType.BFLOAT16.numpy())
    return ir.to_proto(ir.tensor(rounded, name=tensor.name))


def _operators(path: Path) -> list[str]:
    """What a model computes with; weights of another type are cast before."""
    return [node.op_type for node in ir.load(path).graph if node.op_type != "Cast"]


# --- encodings ---

_FILE = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)


@pytest.mark.parametrize(
    ("operator", "attributes", "kept", "axis"),
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
    kept: npt.NDArray[Any],
    axis: int,
    kind: str,
    import_changed: ImportChanged,
) -> None:
    """The operator sees [in, out]; the file keeps it as it likes, and so does the encoding."""

    def seen(model: onnx.ModelProto) -> None:
        product = next(node for node in model.graph.node if node.output[0] == "logits")
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(kept), "file"))
        node = helper.make_node(operator, ["file"], ["seen"], **attributes)
        model.graph.node.insert(0, node)
        product.input[1] = "seen"

    grid = per_channel_encoding("seen", _FILE.T, 1, 4) if kind == "per_channel" else _lpbq("seen")
    path = import_changed(_SYMBOLIC, seen, SHAPE, grid)
    (found,) = load_encodings(path.with_suffix(".encodings")).param_encodings
    blocks = None if grid.block_axis is None else 1 - axis
    assert found == grid.model_copy(update={"name": "file", "axis": axis, "block_axis": blocks})


def _lpbq(name: str) -> Encoding:
    return lpbq_encoding(name, _FILE.T, 1, 16)


# --- what an import must not read over ---


def vocabulary_in_another_order(model: onnx.ModelProto) -> None:
    _rename_output(model, "logits", "ordered")
    halves = numpy_helper.from_array(np.array([32, 32]), "halves")
    model.graph.initializer.append(halves)
    model.graph.node.extend(
        [
            helper.make_node("Split", ["ordered", "halves"], ["low", "high"], axis=2),
            helper.make_node("Concat", ["high", "low"], ["logits"], axis=2),
        ]
    )


def tokens_backwards(model: onnx.ModelProto) -> None:
    _rename_output(model, "logits", "ordered")
    bounds = {"start": -1, "stop": -(1 << 62), "axis": 1, "step": -1}
    for name, number in bounds.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array([number]), name))
    model.graph.node.append(helper.make_node("Slice", ["ordered", *bounds], ["logits"]))


def logits_as_integers(model: onnx.ModelProto) -> None:
    _rename_output(model, "logits", "exact")
    model.graph.node.extend(
        [
            helper.make_node("Cast", ["exact"], ["whole"], to=TensorProto.INT32),
            helper.make_node("Cast", ["whole"], ["logits"], to=TensorProto.FLOAT),
        ]
    )


def tokens_as_bytes(model: onnx.ModelProto) -> None:
    _use_instead(model, "input_ids", "wrapped")
    model.graph.node.insert(
        0, helper.make_node("Cast", ["input_ids"], ["wrapped"], to=TensorProto.UINT8)
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (vocabulary_in_another_order, "output logits does not hold the scores of the vocabulary"),
        (tokens_backwards, "output logits does not hold the scores of the vocabulary"),
        (logits_as_integers, "Cast .* turns an activation into INT32"),
        (tokens_as_bytes, "Cast .* turns an activation into UINT8"),
    ],
)
def test_changes_of_the_result_are_refused(
    change: Change, reason: str, import_changed: ImportChanged
) -> None:
    with pytest.raises(ModelFileError, match=reason):
        import_changed(_SYMBOLIC, change, SHAPE)


def test_operators_mean_what_their_opset_says(import_changed: ImportChanged) -> None:
    def softmax_of_old(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = 12
        for node in model.graph.node:
            if node.op_type == "Softmax":
                del node.attribute[:]

    def too_old(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = 6

    with pytest.raises(ModelFileError, match=r"Softmax .* axis 1 and all behind it"):
        import_changed(_FED, softmax_of_old, SHAPE)
    with pytest.raises(ModelFileError, match="opset 6; the oldest"):
        import_changed(_FED, too_old, SHAPE)


def tables_exchanged(model: onnx.ModelProto) -> None:
    names = {"position_ids_cos": "position_ids_sin", "position_ids_sin": "position_ids_cos"}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


def turned_the_other_way(model: onnx.ModelProto) -> None:
    _use_instead(model, "position_ids_sin", "mirrored")
    model.graph.node.insert(0, helper.make_node("Neg", ["position_ids_sin"], ["mirrored"]))


def positions_of_other_tokens(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([3, 2, 1, 0]), "order"))
    for table in ("position_ids_cos", "position_ids_sin"):
        _use_instead(model, table, f"{table}_moved")
        inputs, outputs = [table, "order"], [f"{table}_moved"]
        model.graph.node.insert(0, helper.make_node("Gather", inputs, outputs, axis=2))


@pytest.mark.parametrize("name", [_FED, "notebook-llama-mha"])
@pytest.mark.parametrize(
    "change", [tables_exchanged, turned_the_other_way, positions_of_other_tokens]
)
def test_heads_turn_by_the_tables_that_a_host_feeds(
    name: str, change: Change, import_changed: ImportChanged
) -> None:
    with pytest.raises(ModelFileError, match="otherwise than by the cosines and sines"):
        import_changed(name, change, SHAPE)


def mask_of_the_other_sign(model: onnx.ModelProto) -> None:
    _use_instead(model, "attention_mask", "negated")
    model.graph.node.insert(0, helper.make_node("Neg", ["attention_mask"], ["negated"]))


def mask_that_hides_nothing(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "zero"))
    _use_instead(model, "attention_mask", "lifted")
    node = helper.make_node("Mul", ["attention_mask", "zero"], ["lifted"])
    model.graph.node.insert(0, node)


@pytest.mark.parametrize("change", [mask_of_the_other_sign, mask_that_hides_nothing])
def test_a_mask_is_followed_at_one_token_too(change: Change, import_changed: ImportChanged) -> None:
    """One token sees all of a full past: that tells a mask from none only where slots are free."""

    def decoding(model: onnx.ModelProto) -> None:
        change(model)
        for value in model.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_value = {"s43": 1, "s54": 16}.get(dim.dim_param, 15)

    with pytest.raises(ModelFileError, match="not the causal one"):
        import_changed("aihub-llama", decoding, GraphShape(1, 16))


WINDOW = 6


def mask_of_a_sliding_window(model: onnx.ModelProto) -> None:
    """Hide by a constant what lies before the window of a token, of a past that is full."""
    ar, cl = SHAPE.ar, SHAPE.cl
    distance = (cl - ar + np.arange(ar))[:, None] - np.arange(cl)
    hidden = np.where(distance >= WINDOW, -100.0, 0.0).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(hidden[None, None], "before_window"))
    _use_instead(model, "attention_mask", "windowed")
    node = helper.make_node("Min", ["attention_mask", "before_window"], ["windowed"])
    model.graph.node.insert(0, node)


def test_the_mask_of_a_sliding_window_is_made_from_the_one_that_is_fed(
    import_changed: ImportChanged,
) -> None:
    windowed = import_changed(_FED, mask_of_a_sliding_window, SHAPE)
    whole = import_changed(_FED, nothing, SHAPE)
    rng, results = np.random.default_rng(0), []
    mask = np.zeros((SHAPE.ar, SHAPE.cl), np.float32)
    mask[:, SHAPE.past :][np.triu_indices(SHAPE.ar, 1)] = interface.MASKED
    near = np.tril(np.ones_like(mask), SHAPE.past) * np.triu(
        np.ones_like(mask), SHAPE.past - WINDOW + 1
    )
    feeds = {
        port.name: rng.normal(size=port.shape).astype(port.dtype)
        for port in read_ports(whole).inputs.values()
    }
    for path, fed in ((windowed, mask), (whole, np.where(near, mask, interface.MASKED))):
        given = feeds | {interface.ATTENTION_MASK: fed[None, None].astype(np.float32)}
        results.append(OnnxRunner(path, n_threads=1).run(given)[interface.LOGITS])
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-5)


def _rename_output(model: onnx.ModelProto, name: str, new: str) -> None:
    for node in model.graph.node:
        node.output[:] = [new if output == name else output for output in node.output]


def _use_instead(model: onnx.ModelProto, name: str, new: str) -> None:
    for node in model.graph.node:
        node.input[:] = [new if value == name else value for value in node.input]


def test_an_export_without_caches_says_what_to_export(import_changed: ImportChanged) -> None:
    def without_caches(model: onnx.ModelProto) -> None:
        for value in [value for value in model.graph.input if "past" in value.name]:
            model.graph.input.remove(value)
            empty = np.zeros((1, 2, 0, 8), np.float32)
            model.graph.initializer.append(numpy_helper.from_array(empty, value.name))

    with pytest.raises(ModelFileError, match="past_key_values as inputs"):
        import_changed(_SYMBOLIC, without_caches, SHAPE)
