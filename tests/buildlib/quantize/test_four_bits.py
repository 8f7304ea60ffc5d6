"""4-bit weights: their storage, and how the real compiler and emulator compute with them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper

from buildlib.encodings.model import Encoding, Encodings, asymmetric_encoding
from buildlib.errors import EncodingsError
from buildlib.numerics.emulator import EmulatorProcess
from buildlib.numerics.runners import Arrays, OnnxRunner
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.weight_grids import lpbq_encoding, per_channel_encoding
from buildlib.targets import parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from tests.buildlib.onnx_models import model_of, value_info

WIDTH_IN, WIDTH_OUT, TOKENS, BLOCK = 128, 96, 16, 32
FORMS = ("gemm", "gemm_with_bias", "matmul")
Weights = npt.NDArray[np.float32]


def write_model(path: Path) -> dict[str, Weights]:
    """A product of `x` in each form that models have; returns the constants."""
    rng = np.random.default_rng(5)
    nodes, constants = [], {}
    for form in FORMS:
        weights = rng.normal(size=(WIDTH_OUT, WIDTH_IN)) * rng.uniform(0.01, 0.2, (WIDTH_OUT, 1))
        constants[f"{form}_w"] = weights.astype(np.float32)
        node = helper.make_node("Gemm", ["x", f"{form}_w"], [form], form, transB=1)
        if form == "matmul":
            node = helper.make_node("MatMul", ["x", f"{form}_w"], [form], form)
            constants[f"{form}_w"] = np.ascontiguousarray(constants[f"{form}_w"].T)
        if "bias" in form:
            constants["bias"] = rng.normal(size=WIDTH_OUT).astype(np.float32)
            node.input.append("bias")
        nodes.append(node)
    outputs = dict.fromkeys(FORMS, (np.float32, [TOKENS, WIDTH_OUT]))
    inputs = {"x": (np.float32, [TOKENS, WIDTH_IN])}
    onnx.save(model_of(nodes, inputs, outputs, constants, 23), path)
    return constants


GRIDS: dict[str, Callable[[str, Weights, int], Encoding]] = {
    "per_channel": lambda name, weights, axis: per_channel_encoding(name, weights, axis, 4),
    "lpbq": lambda name, weights, axis: lpbq_encoding(name, weights, axis, BLOCK),
}


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize("kind", GRIDS)
def test_four_bits_on_the_emulator_are_those_on_the_cpu(kind: str, tmp_path: Path) -> None:
    constants = write_model(tmp_path / "float.onnx")
    params, activations = [], [asymmetric_encoding("x", -1, 1, 16)]
    x = np.random.default_rng(6).uniform(-1, 1, (TOKENS, WIDTH_IN)).astype(np.float32)
    real = {}
    for form in FORMS:
        weights = constants[f"{form}_w"]
        params.append(GRIDS[kind](f"{form}_w", weights, 1 if form == "matmul" else 0))
        real[form] = x @ (weights if form == "matmul" else weights.T)
        real[form] += constants["bias"] if "bias" in form else 0.0
        activations.append(
            asymmetric_encoding(form, float(real[form].min()), float(real[form].max()), 16)
        )
    encodings = Encodings(activation_encodings=tuple(activations), param_encodings=tuple(params))
    qdq = apply_encodings(tmp_path / "float.onnx", encodings, tmp_path / "q.onnx")
    n_weights = len(FORMS) * WIDTH_IN * WIDTH_OUT
    assert qdq.with_suffix(".weights").stat().st_size < n_weights * 0.6
    runner = OnnxRunner(qdq)
    ports = runner.ports
    feeds = ports.feeds({"x": x})
    on_cpu = runner.run(feeds)
    compiled = on_emulator(qdq, feeds)
    for form in FORMS:
        expected, found = (ports.outputs[form].dequantize(a[form]) for a in (on_cpu, compiled))
        assert sqnr_db(real[form], expected) > 15.0, form
        assert sqnr_db(expected, found) > 60.0, form


def write_tied(path: Path) -> Weights:
    """Tokens looked up in a table, and scored against it: `ids` -> `rows` -> `scores`."""
    rng = np.random.default_rng(8)
    table = (
        rng.normal(size=(WIDTH_OUT, WIDTH_IN)) * rng.uniform(0.01, 0.2, (WIDTH_OUT, 1))
    ).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], "lookup", axis=0),
        helper.make_node("Gemm", ["rows", "table"], ["scores"], "head", transB=1),
    ]
    outputs = {"scores": (np.float32, [TOKENS, WIDTH_OUT])}
    model = model_of(nodes, {"ids": (np.int32, [TOKENS])}, outputs, {"table": table}, 23)
    model.graph.value_info.extend(value_info({"rows": (np.float32, [TOKENS, WIDTH_IN])}))
    onnx.save(model, path)
    return table


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize("kind", GRIDS)
def test_a_tied_table_is_looked_up_on_the_grid_of_its_rows(kind: str, tmp_path: Path) -> None:
    """QNN multiplies with a table whose channels have scales of their own, but looks none up."""
    table = write_tied(tmp_path / "float.onnx")
    ids = np.arange(TOKENS, dtype=np.int32) * 3
    real = table[ids] @ table.T
    encodings = Encodings(
        activation_encodings=(
            asymmetric_encoding("rows", float(table.min()), float(table.max()), 16),
            asymmetric_encoding("scores", float(real.min()), float(real.max()), 16),
        ),
        param_encodings=(GRIDS[kind]("table", table, 0),),
    )
    qdq = apply_encodings(tmp_path / "float.onnx", encodings, tmp_path / "q.onnx")
    runner = OnnxRunner(qdq)
    port = runner.ports.outputs["scores"]
    expected = port.dequantize(runner.run({"ids": ids})["scores"])
    assert sqnr_db(real, expected) > 15.0
    compiled = port.dequantize(on_emulator(qdq, {"ids": ids})["scores"])
    assert sqnr_db(expected, compiled) > 60.0


def one_product(path: Path, shape: tuple[int, int]) -> Weights:
    """y = x W, and W."""
    weights = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    node = helper.make_node("Gemm", ["x", "w"], ["y"], "product", transB=1)
    x, y = {"x": (np.float32, [TOKENS, shape[1]])}, {"y": (np.float32, [TOKENS, shape[0]])}
    onnx.save(model_of([node], x, y, {"w": weights}, 23), path)
    return weights


def encoded(weights: Encoding) -> Encodings:
    activations = (asymmetric_encoding("x", -1, 1, 16), asymmetric_encoding("y", -50, 50, 16))
    return Encodings(activation_encodings=activations, param_encodings=(weights,))


def test_weights_that_htp_computes_wrongly_are_refused(tmp_path: Path) -> None:
    weights = one_product(tmp_path / "m.onnx", (96, 144))
    good = lpbq_encoding("w", weights, 0, 16)
    with pytest.raises(EncodingsError, match=r"w: LPBQ .* 32 must divide the inputs"):
        apply_encodings(tmp_path / "m.onnx", encoded(good), tmp_path / "q.onnx")
    blocks = {"enc_type": "PER_BLOCK", "bw": 4, "compressed_bw": None, "per_block_int_scale": b""}
    with pytest.raises(EncodingsError, match="w: PER_BLOCK, which HTP cannot compile"):
        apply_encodings(
            tmp_path / "m.onnx", encoded(good.model_copy(update=blocks)), tmp_path / "q.onnx"
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"axis": 1}, "channels along axis 1, where"),
        ({"block_size": 64}, "4 blocks of 64|96 channels, 384 blocks of 64"),
        ({"scale": (0.1,) * 95}, "95 channels"),
        ({"compressed_bw": 6}, "LPBQ of 6 bits"),
        ({"dtype": "FLOAT"}, "need one and have none|FLOAT"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(
    changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    weights = one_product(tmp_path / "m.onnx", (96, 128))
    wrong = lpbq_encoding("w", weights, 0, BLOCK).model_copy(update=changes)
    with pytest.raises(EncodingsError, match=said):
        apply_encodings(tmp_path / "m.onnx", encoded(wrong), tmp_path / "q.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def sqnr_db(expected: Weights, found: Weights) -> float:
    noise = float(np.square(expected - found).sum())
    return float(10 * np.log10(float(np.square(expected).sum()) / max(noise, 1e-30)))


def on_emulator(qdq: Path, feeds: Arrays) -> Arrays:
    """Compile a model and run its graph."""
    toolchain, target = OrtQnnToolchain(), parse_target("SM8750:emulator")
    dlc, binary = qdq.with_name("q.dlc"), qdq.with_name("q.bin")
    toolchain.convert(qdq, dlc, target)
    toolchain.compile([dlc], binary, CompileConfig.for_target(target))
    with EmulatorProcess([(binary, dlc.stem)], 69, 60.0) as process:
        return process.request({"run": 0}, feeds)[1]
