"""A small quantized model for the real compiler: one MatMul, int8 weights per output channel."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper

from buildlib.targets import parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from tests.buildlib.onnx_models import model_of

WIDTH_IN, WIDTH_OUT = 256, 512
SCALE_IN, SCALE_OUT = np.float32(1e-4), np.float32(1e-3)
ZERO = np.uint16(32768)


def write_model(path: Path, ar: int) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(7)
    weight = random.integers(-127, 128, (WIDTH_IN, WIDTH_OUT)).astype(np.int8)
    scales = (random.random(WIDTH_OUT) * 1e-3 + 1e-4).astype(np.float32)
    constants: dict[str, npt.NDArray[np.generic]] = {
        "weight": weight,
        "weight_scale": scales,
        "weight_zero": np.zeros(WIDTH_OUT, np.int8),
        "x_scale": np.asarray(SCALE_IN),
        "y_scale": np.asarray(SCALE_OUT),
        "zero": np.asarray(ZERO),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "x_scale", "zero"], ["x_real"]),
        helper.make_node(
            "DequantizeLinear", ["weight", "weight_scale", "weight_zero"], ["w_real"], axis=1
        ),
        helper.make_node("MatMul", ["x_real", "w_real"], ["y_real"]),
        helper.make_node("QuantizeLinear", ["y_real", "y_scale", "zero"], ["y"]),
    ]
    inputs = {"x": (np.uint16, [1, ar, WIDTH_IN])}
    outputs = {"y": (np.uint16, [1, ar, WIDTH_OUT])}
    onnx.save(model_of(nodes, inputs, outputs, constants), path)
    real: npt.NDArray[np.float32] = weight * scales
    return real


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The model at two ARs with the same weights."""
    folder = tmp_path_factory.mktemp("models")
    paths = {ar: folder / f"ar{ar}.onnx" for ar in (1, 32)}
    for ar, path in paths.items():
        write_model(path, ar)
    return paths


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> npt.NDArray[np.float32]:
    """The model's weights as reals: `[inputs, outputs]`."""
    return write_model(tmp_path_factory.mktemp("weights") / "model.onnx", 1)


@pytest.fixture(scope="session")
def toolchain(tmp_path_factory: pytest.TempPathFactory) -> OrtQnnToolchain:
    return OrtQnnToolchain(log_dir=tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="session")
def dlcs(
    models: dict[int, Path],
    toolchain: OrtQnnToolchain,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Path]:
    folder = tmp_path_factory.mktemp("dlcs")
    paths = []
    for ar, model in models.items():
        paths.append(folder / f"ar{ar}_cl64_1_of_1.dlc")
        toolchain.convert(model, paths[-1], parse_target("SM8750"))
    return paths


@pytest.fixture(scope="session")
def binary_for(
    dlcs: list[Path], toolchain: OrtQnnToolchain, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Both graphs compiled for a target, once a session."""
    folder = tmp_path_factory.mktemp("binaries")

    def compiled(target: str) -> Path:
        path = folder / f"{target.replace(':', '_')}.bin"
        if not path.exists():
            toolchain.compile(dlcs, path, CompileConfig.for_target(parse_target(target)))
        return path

    return compiled
