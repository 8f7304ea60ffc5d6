"""Techniques that change weights: what they keep, what they improve, and what they refuse."""

import functools
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.tokenizer import load_tokenizer, text_windows
from buildlib.encodings.grid import weight_grid
from buildlib.encodings.model import Encodings, asymmetric_encoding
from buildlib.errors import BuildError, InvalidOptionError
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.shape import GraphShape
from buildlib.numerics.evaluation import onnx_perplexity
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.quantize.bitwidths import Bitwidths, WeightFormat
from buildlib.quantize.calibration import observe_ranges
from buildlib.quantize.optimization import optimize_weights
from buildlib.quantize.options import QuantizationOptions, TechniqueName
from buildlib.quantize.qdq import quantize_weights
from buildlib.quantize.recipe import complete_encodings
from buildlib.quantize.techniques import gptq
from buildlib.quantize.techniques.arguments import (
    AdaScaleArguments,
    GptaqArguments,
    GptqArguments,
    TechniqueArguments,
)
from buildlib.quantize.techniques.base import FloatModel
from buildlib.quantize.techniques.layerwise import LayerInputs, LayerwiseTechnique, Solution, Solver
from buildlib.quantize.techniques.rotation import RandomRotation
from buildlib.quantize.weight_file import SharedWeights
from buildlib.quantize.weight_grids import fit_steps, full_steps, round_to, stored_steps
from suites.models import tiny_llama

Floats = npt.NDArray[np.float32]
SHAPE = GraphShape(16, 48)
FOUR, WIDTH = WeightFormat(4), 160
FORMATS = [FOUR, WeightFormat(4, 16), WeightFormat(8)]
QUICK = TechniqueArguments(adascale=AdaScaleArguments(num_iterations=48, learning_rate=0.005))
GPTAQ = partial(gptq.solve, to_float=True)
TECHNIQUES = pytest.mark.needs("plugins.techniques")
SOLVERS: dict[str, Solver] = {"gptq": gptq.solve, "gptaq": GPTAQ}


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of this module's own: `float_model` exports it into its folder."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def four_bits(tiny: Path) -> FloatModel:
    """The tiny model, with 4 bits for its weights."""
    return float_model(tiny, Bitwidths(param_bitwidth=4))


def float_model(folder: Path, bits: Bitwidths | None = None, n_windows: int = 3) -> FloatModel:
    checkpoint = Checkpoint.load(folder)
    rng = np.random.default_rng(5)
    windows = rng.integers(0, checkpoint.config.vocab_size, (n_windows, 32)).tolist()
    model = export_onnx(checkpoint, SHAPE, folder)
    return FloatModel(model, Encodings(), checkpoint.config, windows, bits or Bitwidths())


def optimized(model: FloatModel, folder: Path, *names: TechniqueName) -> FloatModel:
    folder.mkdir()
    return optimize_weights(model, names, folder, arguments=QUICK)


def constant(value: ir.Value) -> Floats:
    assert value.const_value is not None
    return tensor_array(value.const_value)


def logits(model: FloatModel) -> Floats:
    with HostLoop({SHAPE.ar: [OnnxRunner(model.path)]}, model.config) as loop:
        return loop.feed(model.token_windows[0])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
        {"model_type": "qwen2", "tie_word_embeddings": False, "hidden_size": 48},
        {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
        {
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ],
)
def test_rotations_leave_the_logits_as_they_are(
    changes: dict[str, object], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = float_model(make_checkpoint(tmp_path / "model", np.float32, **changes))
    turned = optimized(model, tmp_path / "turned", "spinquant")
    assert np.abs(logits(turned) - logits(model)).max() < 1e-3
    before, after = (load_model(m.path).graph.initializers for m in (model, turned))
    name = "model.layers.1.self_attn.v_proj.weight"
    assert np.abs(constant(after[name]) - constant(before[name])).max() > 0.1
    gains = [constant(value) for key, value in after.items() if key.endswith("layernorm.weight")]
    assert len(gains) == 4
    assert all((gain == 1).all() for gain in gains)


@pytest.mark.parametrize("width", [1, 3, 16, 40, 144])
def test_rotations_are_orthogonal(width: int) -> None:
    rotation = RandomRotation.of(width, np.random.default_rng(0))
    whole = np.diag(rotation.signs) @ functools.reduce(np.kron, rotation.factors)
    assert np.abs(whole @ whole.T - np.eye(width)).max() < 1e-12
    values = np.random.default_rng(1).normal(size=(5, 2 * width))
    turned = values @ np.kron(np.eye(2), whole)
    assert np.abs(rotation.turn(values) - turned).max() < 1e-12


def layer(n_channels: int = 24, tokens: int = 512) -> tuple[Floats, LayerInputs]:
    """A weight, and inputs with a few strong directions, as they were and as seen now."""
    rng = np.random.default_rng(3)
    weights = rng.standard_t(4, size=(n_channels, WIDTH)).astype(np.float32)
    real = rng.normal(size=(tokens, WIDTH)) @ rng.normal(size=(WIDTH, WIDTH)) ** 3
    seen = real + 0.3 * rng.normal(size=real.shape) * np.abs(real).mean() + 0.2
    return weights, LayerInputs(real.astype(np.float32), seen.astype(np.float32))


def to_nearest(weights: Floats, fmt: WeightFormat, inputs: LayerInputs | None = None) -> Solution:
    del inputs
    steps = full_steps(weights, fmt)
    return Solution(round_to(weights, stored_steps(steps, fmt, weights.shape[1]), fmt.bits), steps)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", SOLVERS)
def test_the_output_error_is_lower_than_with_rounding_to_the_nearest(
    name: str, fmt: WeightFormat
) -> None:
    weights, inputs = layer()
    found = SOLVERS[name](weights, fmt, inputs)
    aim = inputs.seen if name == "gptq" else inputs.real

    def error(values: Floats) -> float:
        return float(np.square(inputs.seen @ values.T - aim @ weights.T).mean())

    nearest = error(to_nearest(weights, fmt).values)
    assert error(found.values) < (0.9 if fmt.bits == 4 else 1.0) * nearest
    integers = found.values / stored_steps(found.steps, fmt, WIDTH)
    assert np.abs(integers - np.rint(integers)).max() < 1e-4
    assert np.abs(np.rint(integers)).max() <= 1 << (fmt.bits - 1)


def test_blocks_have_the_best_steps_that_lpbq_can_store() -> None:
    weights, inputs = layer()
    fmt = WeightFormat(4, 32)
    steps = fit_steps(weights, fmt, inputs.sizes)
    np.testing.assert_allclose(stored_steps(steps, fmt, WIDTH)[:, ::32], steps, rtol=1e-6)
    blocks = weights.reshape(len(weights), -1, 32)
    factor = inputs.sizes.reshape(-1, 32)

    def errors(tried: npt.NDArray[Any]) -> npt.NDArray[Any]:
        errors = np.square(round_to(blocks, tried[..., None], 4) - blocks) * factor
        return np.asarray(errors.sum(2))

    found, scales = errors(steps), steps.max(axis=1, keepdims=True) / 16
    others = steps < 16 * scales  # than the block that decides the scale
    assert 0.7 < others.mean() < 1
    for multiple in range(1, 17):
        tried = errors(np.broadcast_to(multiple * scales, steps.shape))
        assert (found[others] <= tried[others] * (1 + 1e-5)).all()


def gptq_by_the_paper(
    weights: Floats, steps: Floats, inputs: LayerInputs, order: npt.NDArray[np.intp]
) -> Floats:
    """Round column by column with the inverse of the Hessian, in float64."""
    hessian = inputs.seen.astype(np.float64).T @ inputs.seen / len(inputs.seen)
    hessian[np.diag_indices_from(hessian)] += inputs.damping
    upper = np.linalg.cholesky(np.linalg.inv(hessian[np.ix_(order, order)])).T
    open_weights = weights.T[order].astype(np.float64)
    for row in range(len(order)):
        rounded = round_to(open_weights[row], steps[:, 0], 4)
        error = (open_weights[row] - rounded) / upper[row, row]
        open_weights[row + 1 :] -= np.outer(upper[row, row + 1 :], error)
        open_weights[row] = rounded
    found = np.empty_like(weights.T)
    found[order] = open_weights
    return found.T


@pytest.mark.parametrize("block_size", [7, 64, 300])
def test_blocks_in_float32_round_as_gptq_of_the_paper_does_in_float64(block_size: int) -> None:
    weights, inputs = layer()
    found = gptq.solve(weights, FOUR, inputs, GptqArguments(block_size=block_size))
    steps = stored_steps(found.steps, FOUR, WIDTH)
    order = inputs.factor(by_size=True).order[::-1]
    by_paper = gptq_by_the_paper(weights, steps, inputs, order)

    def error(values: Floats) -> float:
        return float(np.square(inputs.seen @ (values - weights).T).mean())

    assert np.mean(np.abs(found.values - by_paper) > steps / 2) < 0.005
    assert error(found.values) == pytest.approx(error(by_paper), rel=0.01)


@pytest.mark.parametrize("n_outputs", [24, 1100])
def test_gptaq_rounds_as_gptq_does_the_weights_that_meet_the_float_model(n_outputs: int) -> None:
    """With channels for two threads, by either order of products."""
    weights, drawn = layer(1100)
    inputs = replace(drawn, n_outputs=n_outputs)
    found = GPTAQ(weights, FOUR, inputs)
    steps = stored_steps(found.steps, FOUR, WIDTH)
    real, seen = inputs.real.astype(np.float64), inputs.seen.astype(np.float64)
    damped = seen.T @ seen / 512 + inputs.damping * np.eye(WIDTH)
    moved = weights + np.linalg.solve(damped, seen.T @ ((real - seen) @ weights.T) / 512).T
    order = inputs.factor(by_size=True).order[::-1]
    by_paper = gptq_by_the_paper(moved.astype(np.float32), steps, inputs, order)
    assert np.abs(moved - weights).max() > 0.1
    assert np.mean(np.abs(found.values - by_paper) > steps / 2) < 0.005


@pytest.mark.parametrize("name", ["gptq", "gptaq"])
def test_text_of_fewer_tokens_than_inputs_does_no_harm(name: str) -> None:
    """Errors on other text, with the default damping and with GPTQ's."""
    weights, inputs = layer(tokens=2048)

    def error(values: Floats) -> float:
        return float(np.square(inputs.seen @ values.T - inputs.real @ weights.T).mean())

    def solved(damping: float | None) -> float:
        shown = LayerInputs(inputs.real[:64], inputs.seen[:64], damping)
        return error(SOLVERS[name](weights, FOUR, shown).values)

    assert solved(None) < error(to_nearest(weights, FOUR).values)
    assert solved(None) < 0.95 * solved(0.01)


def test_inputs_may_be_zero_and_must_be_finite() -> None:
    weights, zeros = np.ones((3, 6), np.float32), np.zeros((8, 6), np.float32)
    for solver in SOLVERS.values():
        assert np.isfinite(solver(weights, FOUR, LayerInputs(zeros, zeros.copy())).values).all()
    with pytest.raises(BuildError, match="not finite"):
        gptq.solve(weights, FOUR, LayerInputs(zeros * np.nan, zeros * np.nan))


def test_nothing_is_put_beside_the_model_meanwhile(four_bits: FloatModel, tmp_path: Path) -> None:
    """It may be in an entry of the stage cache, which other builds remove if a file is too many."""
    folder = four_bits.path.parent
    seen = [sorted(folder.iterdir())]

    def see(*_: object) -> None:
        seen.append(sorted(folder.iterdir()))

    optimize_weights(four_bits, ["gptq"], tmp_path, see)
    assert len(seen) > 1
    assert all(files == seen[0] for files in seen)


def optimized_weight(
    model: FloatModel, scratch: Path, weight: str, name: TechniqueName, **arguments: object
) -> Floats:
    """A weight of a model after one technique with these arguments."""
    given = TechniqueArguments.model_validate({name: arguments})
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        done = optimize_weights(model, [name], Path(folder), arguments=given)
        found = load_model(done.path).graph.initializers
        return constant(found[f"model.layers.{weight}.weight"]).copy()


def test_arguments_reach_the_techniques(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    model = float_model(folder, Bitwidths(param_bitwidth=4))
    weights = partial(optimized_weight, model, tmp_path, "0.self_attn.v_proj")
    changes: list[tuple[TechniqueName, dict[str, object]]] = [
        ("spinquant", {"seed": 1}),
        ("gptq", {"damping": 0.5}),
        ("gptaq", {"damping": 0.5}),
        ("gptaq", {"act_order": False}),
        ("gptaq", {"num_batches": 1}),
    ]
    default = {name: weights(name) for name in dict(changes)}
    for name, arguments in changes:
        assert np.abs(weights(name, **arguments) - default[name]).max() > 0, arguments
    same = weights("gptq", block_size=5) - default["gptq"]
    assert np.abs(same).max() < 1e-6


def test_gptaq_rounds_as_gptq_where_text_is_short(four_bits: FloatModel, tmp_path: Path) -> None:
    model = four_bits
    n_tokens = sum(map(len, model.token_windows))
    widest = max(int(model.config.intermediate_size), int(model.config.hidden_size))
    weights = partial(optimized_weight, model, tmp_path, "1.mlp.down_proj")
    plain = weights("gptq")
    assert np.array_equal(weights("gptaq", float_text=(n_tokens + 1) / widest), plain)
    assert not np.array_equal(weights("gptaq", float_text=n_tokens / widest), plain)


@pytest.mark.parametrize("names", [("gptaq",), ("spinquant", "gptq")], ids="-".join)
def test_ranges_observed_on_the_way_are_those_of_the_model_made(
    names: tuple[TechniqueName, ...], four_bits: FloatModel, tmp_path: Path
) -> None:
    model = replace(four_bits, n_calibrating=2)
    (tmp_path / "done").mkdir()
    arguments = TechniqueArguments(gptaq=GptaqArguments(float_text=0))
    done = optimize_weights(model, names, tmp_path / "done", arguments=arguments)
    expected = observe_ranges(done.path, done.config, model.token_windows[:2]).ranges()
    longer = observe_ranges(done.path, done.config, model.token_windows).ranges()
    assert done.ranges is not None
    assert done.ranges.keys() == expected.keys()
    for name, limits in expected.items():
        assert done.ranges[name] == pytest.approx(limits, rel=1e-4, abs=1e-5), name
    assert any(longer[name] != pytest.approx(expected[name], rel=1e-2) for name in expected)


@pytest.mark.parametrize(
    ("technique", "block"),
    [
        pytest.param("seqmse", None, marks=TECHNIQUES),
        ("gptaq", 32),
        pytest.param("adascale", 32, marks=TECHNIQUES),
    ],
)
def test_weights_on_their_grids_become_the_same_integers(
    technique: TechniqueName,
    block: int | None,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    sizes["num_hidden_layers"] = 1
    bits = Bitwidths(param_bitwidth=4, lpbq_block_size=block)
    model = float_model(make_checkpoint(tmp_path / "model", **sizes), bits)
    done = optimized(model, tmp_path / "done", technique)
    given = done.encodings.by_name()
    assert len(given) == 7
    complete = complete_encodings(done.path, done.encodings, done.config, done.token_windows, bits)
    weights = SharedWeights(quantize_weights(done.path, tmp_path / "integers.weights", complete))
    graph = load_model(done.path).graph
    for name, encoding in given.items():
        grid, tensor = weight_grid(encoding), graph.initializers[name].const_value
        assert tensor is not None
        values = tensor_array(tensor)
        turned = block is not None  # LPBQ is stored as [in, out]
        stored = weights.weight(name, tensor, grid, int(turned), transposed=turned)
        integers = np.fromfile(stored.path, np.uint8, stored.nbytes, offset=stored.offset or 0)
        integers = np.stack([integers & 15, integers >> 4], 1).astype(np.int8)
        integers = np.where(integers > 7, integers - 16, integers).reshape(stored.shape.numpy())
        again = grid.dequantize(integers, int(turned))
        assert ((again.T if turned else again) == values).all()
        assert len(np.unique(integers)) > 8


def test_patterns_choose_the_bits_of_weights(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    patterns = ("*.down_proj.weight=8", "model.layers.0.*=8", "*.0.*.q_proj.*=4", "lm_head*=4")
    model = float_model(folder, Bitwidths(param_bitwidth=4, mixed_precision=patterns), 1)
    done = optimized(model, tmp_path / "done", "gptq")
    complete = complete_encodings(
        done.path, done.encodings, done.config, done.token_windows, done.bits
    )
    bits = {
        name.removeprefix("model.layers.").removesuffix(".weight"): one.bw
        for name, one in complete.by_name().items()
        if "proj" in name or "lm_head" in name
    }
    assert bits.pop("lm_head") == 4
    assert {name for name, width in bits.items() if width == 4} == {
        "0.self_attn.q_proj",
        *(f"1.self_attn.{which}_proj" for which in "qkvo"),
        "1.mlp.gate_proj",
        "1.mlp.up_proj",
    }
    wrong = replace(model, bits=Bitwidths(mixed_precision=("*.experts.*=4",)))
    said = r"no weight of this model has a name like '\*\.experts\.\*'.*lm_head\.weight"
    with pytest.raises(InvalidOptionError, match=said):
        optimized(wrong, tmp_path / "wrong", "gptq")
    with pytest.raises(InvalidOptionError, match=said):
        complete_encodings(model.path, Encodings(), model.config, (), wrong.bits)


def test_a_weight_outside_the_layers_stays_as_it_is(four_bits: FloatModel, tmp_path: Path) -> None:
    """Such as the projection of a factorized embedding."""
    model = replace(four_bits, bits=Bitwidths())
    whole = load_model(model.path)
    embedding = next(node for node in whole.graph if node.op_type == "Gather")
    width = constant(whole.graph.initializers["model.norm.weight"]).size
    weight = ir.val("projection", const_value=ir.tensor(np.eye(width, dtype=np.float32)))
    whole.graph.register_initializer(weight)
    product = ir.node("MatMul", [embedding.outputs[0], weight])
    projected, embedded = product.outputs[0], embedding.outputs[0]
    projected.name, projected.type, projected.shape = "projected", embedded.type, embedded.shape
    embedded.replace_all_uses_with(projected)
    product.replace_input_with(0, embedded)
    whole.graph.insert_after(embedding, product)
    changed = replace(model, path=save_model(whole, tmp_path / "projected.onnx"))
    found = load_model(optimized(changed, tmp_path / "out", "gptq").path).graph
    assert np.array_equal(constant(found.initializers["projection"]), np.eye(width))


@pytest.mark.parametrize("text", ["down_proj", "=4", "*=3", "*=16"])
def test_patterns_that_say_no_bits_are_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"mixed_precision.*is not PATTERN=BITS"):
        Bitwidths(mixed_precision=(text,))


def test_models_with_encodings_are_not_rotated(four_bits: FloatModel, tmp_path: Path) -> None:
    given = Encodings(activation_encodings=(asymmetric_encoding("logits", -1.0, 1.0, 16),))
    with pytest.raises(InvalidOptionError, match="spinquant cannot be used: it changes weights"):
        optimized(replace(four_bits, encodings=given), tmp_path / "out", "spinquant")


def nearest_model(model: FloatModel, folder: Path) -> FloatModel:
    folder.mkdir()
    return LayerwiseTechnique("nearest", to_nearest).optimize(model, folder)


@pytest.mark.variant
def test_four_bits_close_half_of_the_gap_to_float(trained: Path, tmp_path: Path) -> None:
    """The demand on the default, on text that neither the model nor the technique has seen."""
    checkpoint, shape = Checkpoint.load(trained), GraphShape(64, 192)
    path = export_onnx(checkpoint, shape, tmp_path)
    text = tiny_llama.calibration_text()
    windows = text_windows(checkpoint.tokenizer_path, text, 128, 0, 32)
    bits = Bitwidths.from_options(QuantizationOptions(recipe="w4a16"))
    model = FloatModel(path, Encodings(), checkpoint.config, windows, bits)
    (default,) = QuantizationOptions(param_bitwidth=4).weight_techniques
    best = optimized(model, tmp_path / "best", default)
    worst = nearest_model(replace(model, token_windows=windows[:1]), tmp_path / "nearest")
    tokens = (
        load_tokenizer(checkpoint.tokenizer_path)
        .encode(tiny_llama.heldout_text(), add_special_tokens=False)
        .ids
    )
    scored = [tokens[start : start + 127] for start in range(0, len(tokens) - 127, 127 * 24)]
    in_float, gap, rest = (
        math.log(onnx_perplexity({64: [each]}, checkpoint.config, scored))
        for each in (path, worst.path, best.path)
    )
    assert 0.02 < gap - in_float < 0.06
    assert rest - in_float < 0.5 * (gap - in_float)
