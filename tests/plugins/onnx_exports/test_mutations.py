"""Modified exports: an import refuses, or computes the same as the modified export."""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from buildlib.builder.canonical import ImportModel
from buildlib.errors import BuildError, ModelFileError
from buildlib.graph import interface
from buildlib.graph.files import external_tensors, load_model, save_model
from buildlib.graph.shape import GraphShape

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"
AR, PAST, DIM = 4, 8, 8
Change = Callable[[ir.Model], None]

SWAPS = (
    ("Add", "Sub", "Mul", "Div"),
    ("Sigmoid", "Tanh", "Relu", "Neg", "Identity", "Sqrt", "Reciprocal", "Floor", "Erf"),
    ("LessOrEqual", "GreaterOrEqual", "Less", "Greater"),
    ("ReduceMean", "ReduceSum", "ReduceMax"),
    ("Cos", "Sin"),
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 30), st.sampled_from(["dynamo-llama", "dynamo-qwen2"]))
@example(200, "dynamo-llama")  # a Cast to type -2
def test_a_changed_export_is_refused_or_imported_right(seed: int, name: str) -> None:
    check_mutation(seed, name)


def check_mutation(seed: int, name: str) -> str:
    """What became of it: `refused`, `unrunnable` or `equal`."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "source" / "model.onnx", Path(folder) / "out" / "model.onnx"
        model = load_model(EXPORTS / name / "model.onnx")
        what = mutate(model, random.Random(seed))  # noqa: S311 - nothing secret about it
        save_model(model, source)
        importer = ImportModel(GraphShape(AR, AR + PAST))
        try:
            importer.run(source, out)
        except BuildError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert not out.exists()
            return "refused"
        positions = np.arange(PAST, PAST + AR)
        tables, rope = rotations(positions), importer.rope
        if rope is None or rope.cos.shape[1] != DIM // 2:
            return "other angles"
        own = rotations(rope.first + np.arange(len(rope.cos)))
        if not np.allclose((rope.cos, rope.sin), own, atol=1e-5):
            return "other angles"
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, 60, (1, AR))
        caches = [rng.normal(size=(1, 2, PAST, DIM)).astype("f") for _ in range(4)]
        try:
            session = ort.InferenceSession(source)
            want = session.run(
                ["logits"],
                {
                    "input_ids": ids,
                    "attention_mask": np.ones((1, AR + PAST), np.int64),
                    "position_ids": positions[None],
                }
                | dict(zip([v.name for v in session.get_inputs()][3:], caches, strict=True)),
            )[0]
        except Exception:  # noqa: BLE001  (the changed export is not a model that runs)
            return "unrunnable"
        got = _imported_logits(out, ids, tables, caches)
        scale = max(1e-3, float(np.abs(want).max()))
        assert np.allclose(got, want, atol=3e-5 * scale, equal_nan=True), what
        return "equal"


def rotations(positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    angles = np.outer(positions, 10000.0 ** -(np.arange(0, DIM, 2) / DIM))
    return np.cos(angles).astype("f"), np.sin(angles).astype("f")


def mutate(model: ir.Model, rng: random.Random) -> str:
    """Change one thing; says which."""
    nodes = list(model.graph)
    node = rng.choice(nodes)
    kind = rng.choice(["swap", "attribute", "rewire", "order", "number"])
    group = next((group for group in SWAPS if node.op_type in group), None)
    if kind == "swap" and group is not None:
        was, node.op_type = node.op_type, rng.choice(group)
        return f"{node.name}: {was} -> {node.op_type}"
    if kind == "attribute" and node.attributes:
        name = rng.choice(list(node.attributes))
        value = node.attributes[name].value
        if isinstance(value, int):
            node.attributes[name] = ir.AttrInt64(name, rng.randint(-3, 3))
        elif isinstance(value, tuple | list) and value and isinstance(value[0], int):
            shuffled = list(value)
            rng.shuffle(shuffled)
            node.attributes[name] = ir.AttrInt64s(name, shuffled)
        return f"{node.name}: {name}"
    if kind == "order" and len(node.inputs) > 1:
        first, second = rng.sample(range(len(node.inputs)), 2)
        one, two = node.inputs[first], node.inputs[second]
        node.replace_input_with(first, two)
        node.replace_input_with(second, one)
        return f"{node.name}: inputs {first} and {second}"
    if kind == "number":
        values = [v for v in model.graph.initializers.values() if v.const_value is not None]
        small = [v for v in values if v.const_value is not None and v.const_value.size <= 32]
        value = rng.choice(small)
        assert value.const_value is not None
        array = value.const_value.numpy().copy()
        with np.errstate(over="ignore"):  # masks hold the smallest float, slices the largest int
            array.reshape(-1)[rng.randrange(array.size)] += rng.choice([-1, 1, 2])
        value.const_value = ir.tensor(array, name=value.name)
        return f"{value.name}: number"
    index = rng.randrange(len(node.inputs))
    before = nodes[: nodes.index(node)]
    others = [output for other in before for output in other.outputs] + list(model.graph.inputs)
    node.replace_input_with(index, rng.choice(others))
    return f"{node.name}: input {index}"


def _imported_logits(
    path: Path,
    ids: npt.NDArray[np.int64],
    tables: tuple[npt.NDArray[Any], npt.NDArray[Any]],
    caches: list[npt.NDArray[Any]],
) -> npt.NDArray[Any]:
    mask = np.zeros((1, 1, AR, AR + PAST), np.float32)
    mask[0, 0, :, PAST:][np.triu_indices(AR, 1)] = -1e4
    feeds = {
        interface.INPUT_IDS: ids.astype(np.int32),
        interface.ATTENTION_MASK: mask,
        interface.COS: tables[0][None, None],
        interface.SIN: tables[1][None, None],
    }
    for layer in range(2):
        feeds[interface.past_key(layer, "in")] = caches[2 * layer].transpose(1, 0, 3, 2)
        feeds[interface.past_value(layer, "in")] = caches[2 * layer + 1].transpose(1, 0, 2, 3)
    logits: npt.NDArray[Any] = ort.InferenceSession(path).run([interface.LOGITS], feeds)[0]
    return logits


def _of(model: ir.Model, op_type: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == op_type)


def _exchange(node: ir.Node) -> None:
    first, second = node.inputs
    node.replace_input_with(0, second)
    node.replace_input_with(1, first)


def renamed(op_type: str, other: str) -> Change:
    """Make another operator of all of a kind."""

    def change(model: ir.Model) -> None:
        for node in model.graph:
            if node.op_type == op_type:
                node.op_type = other

    return change


def divided_by_zero(model: ir.Model) -> None:
    zero = ir.Value(name="zero", const_value=ir.tensor(np.zeros(1, np.float32)))
    model.graph.register_initializer(zero)
    node = _of(model, "Softmax")
    divided = ir.Node("", "Div", [node.inputs[0], zero], name="divided")
    model.graph.insert_before(node, divided)
    node.replace_input_with(0, divided.outputs[0])


def fused(model: ir.Model) -> None:
    node = _of(model, "Sigmoid")
    node.domain, node.op_type = "com.microsoft", "QuickGelu"
    model.opset_imports["com.microsoft"] = 1


def caches_of_two_layers(model: ir.Model) -> None:
    one, two = [v for v in model.graph.inputs if str(v.name).endswith("key")]
    names = one.name, two.name
    one.name = "swapped"
    two.name, one.name = names


def no_caches(model: ir.Model) -> None:
    ids = ir.Value(
        name="input_ids", shape=ir.Shape([1, "n"]), type=ir.TensorType(ir.DataType.INT64)
    )
    node = ir.node("Identity", [ids])
    node.outputs[0].name = "out"
    model.graph = ir.Graph([ids], node.outputs, nodes=[node], opset_imports={"": 18})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (renamed("Sigmoid", "Floor"), r": Floor '.*' \(2 of this operator\)"),
        (divided_by_zero, "Div 'divided' .*divides by zero"),
        (renamed("Sigmoid", "Cast"), ": Cast "),
        (fused, r"com\.microsoft"),
        (renamed("LessOrEqual", "GreaterOrEqual"), "causal"),
        (renamed("Neg", "Identity"), "angles"),
        (caches_of_two_layers, r"past_key_values\.1\.key with past_key_values\.0\.value"),
        (no_caches, "past keys"),
    ],
)
def test_a_change_of_an_export_is_named(change: Change, reason: str, tmp_path: Path) -> None:
    model = load_model(EXPORTS / "dynamo-llama" / "model.onnx")
    change(model)
    source = save_model(model, tmp_path / "source" / "model.onnx")
    with pytest.raises(ModelFileError, match=reason) as caught:
        ImportModel(GraphShape(4, 16)).run(source, tmp_path / "out" / "model.onnx")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def reshaped_to_weights(model: ir.Model) -> None:
    """Weights lie in a file that other models share by hard links."""
    tensors = {id(tensor) for tensor in external_tensors(model)}
    values = model.graph.initializers.values()
    weight = next(value for value in values if id(value.const_value) in tensors)
    _of(model, "Reshape").replace_input_with(1, weight)


def past_behind_the_new(model: ir.Model) -> None:
    past = next(value for value in model.graph.inputs if value.name == "past_value_1_in")
    ((joined, _),) = past.uses()
    _exchange(joined)


def attention_without_a_softmax(model: ir.Model) -> None:
    softmax = _of(model, "Softmax")
    plain = ir.Node("", "Concat", list(softmax.inputs), {"axis": ir.AttrInt64("axis", -1)})
    model.graph.insert_before(softmax, plain)
    softmax.outputs[0].replace_all_uses_with(plain.outputs[0])
    model.graph.remove(softmax)


def norm_over_other_axes(model: ir.Model) -> None:
    _of(model, "RMSNormalization").attributes["axis"] = ir.AttrInt64("axis", 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (reshaped_to_weights, "Reshape"),
        (past_behind_the_new, "keys or values that do not begin with"),
        (attention_without_a_softmax, "joins attention scores"),
        (norm_over_other_axes, "RMSNormalization"),
        (lambda model: _exchange(_of(model, "RMSNormalization")), "RMSNormalization"),
    ],
)
def test_a_change_of_a_canonical_model_is_named(
    change: Change, reason: str, tiny_export: Path, tmp_path: Path
) -> None:
    model = load_model(tiny_export / "model.onnx")
    change(model)
    source = save_model(model, tmp_path / "source" / "model.onnx")
    with pytest.raises(ModelFileError, match=reason):
        ImportModel().run(source, tmp_path / "out" / "model.onnx")


def test_a_huge_input_is_refused_before_it_is_made(tmp_path: Path) -> None:
    model = load_model(EXPORTS / "aihub-llama" / "model.onnx")
    mask = next(value for value in model.graph.inputs if "mask" in str(value.name))
    mask.shape = ir.Shape((1, 1 << 40, *list(mask.shape or ())[2:]))
    source = save_model(model, tmp_path / "source" / "model.onnx")
    with pytest.raises(ModelFileError, match="too large to be computed with"):
        ImportModel(GraphShape(4, 16)).run(source, tmp_path / "out" / "model.onnx")
