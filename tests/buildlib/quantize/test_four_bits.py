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
from buildlib.numerics.divergence import sqnr_db
from buildlib.numerics.emulator import EmulatorProcess
from buildlib.numerics.runners import OnnxRunner
from buildlib.quantize.bitwidths import kills_emulator
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.weight_grids import lpbq_encoding, per_channel_encoding
from buildlib.targets import parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from tests.buildlib.onnx_models import model_of, value_info

WIDTH_IN, WIDTH_OUT, TOKENS, BLOCK = 128, 96, 16, 32
Weights = npt.NDArray[np.float32]
GRIDS: dict[str, Callable[[str, Weights, int], Encoding]] = {
    "per_channel": lambda name, weights, axis: per_channel_encoding(name, weights, axis, 4),
    "lpbq": lambda name, weights, axis: lpbq_encoding(name, weights, axis, BLOCK),
}


def write_model(path: Path) -> dict[str, Weights]:
    """Products in each form that models have, and a table to look up and to score against.

    Returns the constants; QNN multiplies with a table whose channels have scales of their own, but
    looks none up.
    """
    rng = np.random.default_rng(5)

    def drawn() -> Weights:
        weights = rng.normal(size=(WIDTH_OUT, WIDTH_IN)) * rng.uniform(0.01, 0.2, (WIDTH_OUT, 1))
        return weights.astype(np.float32)

    constants = {name: drawn() for name in ("gemm_w", "biased_w", "matmul_w", "table")}
    constants["matmul_w"] = np.ascontiguousarray(constants["matmul_w"].T)
    constants["bias"] = rng.normal(size=WIDTH_OUT).astype(np.float32)
    nodes = [
        helper.make_node("Gemm", ["x", "gemm_w"], ["gemm"], "gemm", transB=1),
        helper.make_node("Gemm", ["x", "biased_w", "bias"], ["biased"], "biased", transB=1),
        helper.make_node("MatMul", ["x", "matmul_w"], ["matmul"], "matmul"),
        helper.make_node("Gather", ["table", "ids"], ["rows"], "lookup", axis=0),
        helper.make_node("Gemm", ["rows", "table"], ["scores"], "head", transB=1),
    ]
    names = ("gemm", "biased", "matmul", "scores")
    outputs = dict.fromkeys(names, (np.float32, [TOKENS, WIDTH_OUT]))
    inputs = {"x": (np.float32, [TOKENS, WIDTH_IN]), "ids": (np.int32, [TOKENS])}
    model = model_of(nodes, inputs, outputs, constants, 23)
    model.graph.value_info.extend(value_info({"rows": (np.float32, [TOKENS, WIDTH_IN])}))
    onnx.save(model, path)
    return constants


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize("kind", GRIDS)
def test_four_bits_on_the_emulator_are_those_on_the_cpu(kind: str, tmp_path: Path) -> None:
    constants = write_model(tmp_path / "float.onnx")
    x = np.random.default_rng(6).uniform(-1, 1, (TOKENS, WIDTH_IN)).astype(np.float32)
    ids = np.arange(TOKENS, dtype=np.int32) * 3
    real = {
        "rows": (table := constants["table"])[ids],
        "gemm": x @ constants["gemm_w"].T,
        "biased": x @ constants["biased_w"].T + constants["bias"],
        "matmul": x @ constants["matmul_w"],
        "scores": table[ids] @ table.T,
    }
    ends = {name: (float(one.min()), float(one.max())) for name, one in real.items()}
    ends |= {"x": (-1.0, 1.0), "rows": (float(table.min()), float(table.max()))}
    bias = constants.pop("bias")
    assert bias.any()
    encodings = Encodings(
        activation_encodings=tuple(asymmetric_encoding(n, *e, 16) for n, e in ends.items()),
        param_encodings=tuple(
            GRIDS[kind](n, w, int(n == "matmul_w")) for n, w in constants.items()
        ),
    )
    qdq = apply_encodings(tmp_path / "float.onnx", encodings, tmp_path / "q.onnx")
    n_weights = len(constants) * WIDTH_IN * WIDTH_OUT  # the table once more, of 16 bits
    assert qdq.with_suffix(".weights").stat().st_size < n_weights * 0.6 + 2 * table.size
    runner = OnnxRunner(qdq)
    feeds = runner.ports.feeds({"x": x, "ids": ids})
    on_cpu = runner.run(feeds)
    toolchain, target = OrtQnnToolchain(), parse_target("SM8750:emulator")
    dlc, binary = tmp_path / "q.dlc", tmp_path / "q.bin"
    toolchain.convert(qdq, dlc, target)
    toolchain.compile([dlc], binary, CompileConfig.for_target(target))
    with EmulatorProcess([(binary, dlc.stem)], 69, 60.0) as process:
        compiled = process.request({"run": 0}, feeds)[1]
    for name, port in runner.ports.outputs.items():
        assert sqnr_db(real[name], port.dequantize(on_cpu[name])) > 15.0, name
        assert sqnr_db(port.dequantize(on_cpu[name]), port.dequantize(compiled[name])) > 60.0, name


def quantized_product(folder: Path, width: int, block: int, **changes: object) -> Path:
    """Quantize `y = x W` by LPBQ, whose encoding is changed."""
    weights = np.random.default_rng(1).normal(size=(96, width)).astype(np.float32)
    node = helper.make_node("Gemm", ["x", "w"], ["y"], "product", transB=1)
    x, y = {"x": (np.float32, [TOKENS, width])}, {"y": (np.float32, [TOKENS, 96])}
    onnx.save(model_of([node], x, y, {"w": weights}, 23), folder / "m.onnx")
    activations = (asymmetric_encoding("x", -1, 1, 16), asymmetric_encoding("y", -50, 50, 16))
    encoding = lpbq_encoding("w", weights, 0, block).model_copy(update=changes)
    encodings = Encodings(activation_encodings=activations, param_encodings=(encoding,))
    return apply_encodings(folder / "m.onnx", encodings, folder / "q.onnx")


BY_BLOCK = {"enc_type": "PER_BLOCK", "bw": 4, "compressed_bw": None, "per_block_int_scale": b""}


def test_blocks_of_64_that_the_emulator_survives() -> None:
    """All widths of up to 32 such blocks were tried, on QNN 2.51."""
    fatal = [count for count in range(2, 33) if kills_emulator(64 * count, 64)]
    assert fatal == [7, 8, 9, 13, 14, 19]
    assert not any(kills_emulator(896, block) for block in (16, 32, 128, 224))


@pytest.mark.parametrize(
    ("width", "block", "changes", "said"),
    [
        (144, 16, {}, r"w: LPBQ .* 32 must divide the inputs"),  # HTP computes it wrongly
        (896, 64, {}, "w: the HTP emulator dies of 896 inputs in blocks of 64; take 32"),
        (144, 16, BY_BLOCK, "w: PER_BLOCK, which HTP cannot compile"),
        (128, BLOCK, {"axis": 1}, "channels along axis 1, where"),
        (128, BLOCK, {"block_size": 64}, "4 blocks of 64|96 channels, 384 blocks of 64"),
        (128, BLOCK, {"scale": (0.1,) * 95}, "95 channels"),
        (128, BLOCK, {"compressed_bw": 6}, "LPBQ of 6 bits"),
        (128, BLOCK, {"dtype": "FLOAT"}, "need one and have none|FLOAT"),
    ],
)
def test_blocks_that_cannot_be_built_are_refused(
    width: int, block: int, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(EncodingsError, match=said):
        quantized_product(tmp_path, width, block, **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
