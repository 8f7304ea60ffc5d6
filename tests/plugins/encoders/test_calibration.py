"""Calibration of an encoder: texts of all lengths, ranges with a margin, weights well rounded."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from buildlib.encodings.model import Encodings
from buildlib.numerics.runners import OnnxRunner
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.options import QuantizationOptions
from plugins.encoders.calibration import (
    calibration_tokens,
    observe_encoder,
    round_weights,
    rounding_technique,
)
from plugins.encoders.inputs import TextTokens, padded_inputs
from plugins.encoders.interface import prompt_template
from plugins.encoders.onnx_import import import_encoder

FOLDER = Path(__file__).parents[2] / "fixtures" / "encoders" / "sentence-bert"
LENGTH = 32
SENTENCES = ("A ferry leaves the harbour.", "Bees?", "Snow fell all night, and nobody came.")
TEXT = "\n".join(SENTENCES * 20)


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    tokenizer = FOLDER / "tokenizer.json"
    tokens = TextTokens(tokenizer, prompt_template(tokenizer), LENGTH)
    return list(calibration_tokens(tokens, TEXT))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imported") / "model.onnx"
    return import_encoder(FOLDER / "model.onnx", path, LENGTH)


def test_a_text_calibrates_as_texts_of_all_lengths(windows: list[list[int]]) -> None:
    first, last = 2, 3  # [CLS], [SEP]
    assert {window[0] for window in windows} == {first}
    assert {window[-1] for window in windows if len(window) < LENGTH} == {last}
    assert all(window[1:].count(first) == 0 and window[:-1].count(last) == 0 for window in windows)
    lengths = {len(window) for window in windows}
    assert max(lengths) == LENGTH
    assert {len("a") + 2, len("bees?") + 2} <= lengths  # a word, a sentence; tokens are letters
    assert len([1 for window in windows if len(window) < LENGTH // 2]) > len(windows) // 4


def test_ranges_of_sixteen_bits_have_a_margin(
    model: Path, windows: list[list[int]], tmp_path: Path
) -> None:
    narrow, wide = (observe_encoder(model, windows, 0, tmp_path, bits) for bits in (8, 16))
    low, high = narrow["pooled_output"]
    assert wide["pooled_output"] == pytest.approx((1.5 * low, 1.5 * high))


@pytest.mark.needs("plugins.techniques")
@pytest.mark.parametrize("axis", ["MatMul", "Gemm"])
def test_rounded_weights_have_smaller_errors_than_the_nearest(
    model: Path, windows: list[list[int]], tmp_path: Path, axis: str
) -> None:
    """Of the outputs, whichever way the weights lie."""
    source = model if axis == "MatMul" else as_gemms(model, tmp_path / "gemms.onnx")
    bits = Bitwidths(param_bitwidth=4)
    outputs = {"float": run(source, windows)}
    nearest = {"techniques": ["seqmse"], "technique_kwargs": {"seqmse": {"num_candidates": 1}}}
    for name, options in (("nearest", nearest), ("gptq", {})):
        technique = rounding_technique(QuantizationOptions.model_validate(options))
        assert technique is not None
        (tmp_path / name).mkdir()
        rounded, encodings = round_weights(
            source, Encodings(), windows, 0, technique, bits, tmp_path / name
        )
        assert len(encodings.param_encodings) == 12  # of 2 layers
        outputs[name] = run(rounded, windows)
    errors = {name: np.square(outputs[name] - outputs["float"]).mean() for name in outputs}
    assert 0 < errors["gptq"] < 0.7 * errors["nearest"]


def run(model: Path, windows: list[list[int]]) -> np.ndarray:
    runner = OnnxRunner(model)
    rows = [
        runner.run(padded_inputs(each, LENGTH, 0))["sequence_output"][0, -len(each) :]
        for each in windows
    ]
    return np.concatenate(rows)


def as_gemms(model: Path, out: Path) -> Path:
    proto = onnx.load(model)
    weights = {each.name: each for each in proto.graph.initializer}
    nodes = []
    for node in proto.graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights:
            nodes.append(node)
            continue
        weight = onnx.numpy_helper.to_array(weights[node.input[1]])
        turned = onnx.numpy_helper.from_array(np.ascontiguousarray(weight.T), node.input[1])
        weights[node.input[1]].CopyFrom(turned)
        flat, product = f"{node.output[0]}_flat", f"{node.output[0]}_product"
        shape = onnx.numpy_helper.from_array(np.array([LENGTH, len(weight)]), f"{flat}_shape")
        back = onnx.numpy_helper.from_array(
            np.array([1, LENGTH, weight.shape[1]]), f"{product}_shape"
        )
        proto.graph.initializer.extend([shape, back])
        nodes += [
            onnx.helper.make_node("Reshape", [node.input[0], shape.name], [flat], flat),
            onnx.helper.make_node("Gemm", [flat, node.input[1]], [product], product, transB=1),
            onnx.helper.make_node("Reshape", [product, back.name], node.output, node.name),
        ]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    onnx.save(proto, out)
    return out
