"""Exchange with AIMET: what we write it quantizes, and what it writes we build."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from buildlib.checkpoint.config import load_config
from buildlib.encodings.files import load_encodings
from buildlib.encodings.grid import weight_grid
from buildlib.graph.files import load_model, tensor_array
from buildlib.graph.shape import GraphShape
from buildlib.numerics.feeds import CallInputs
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner, read_ports
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.recipe import complete_encodings, matrix_uses
from plugins.onnx_exports.command import export_for_aimet
from tests.command_line import qnnfarm

SHAPE = GraphShape(16, 48)


@pytest.fixture(scope="module")
def exported(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_for_aimet(tiny, tmp_path_factory.mktemp("aimet"), SHAPE)


def logits(path: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    with HostLoop({SHAPE.ar: [OnnxRunner(path)]}, load_config(path.parent / "config.json")) as loop:
        return loop.feed(tokens)


def test_every_weight_is_a_float32_initializer(exported: Path, tiny_export: Path) -> None:
    onnx.checker.check_model(exported)
    graph = load_model(exported).graph
    assert "Cast" not in {node.op_type for node in graph}
    assert {path.name for path in exported.parent.iterdir()} == {
        "config.json", "float32.safetensors", "model.onnx", "tokenizer.json",
    }  # fmt: skip
    before = load_model(tiny_export / "model.onnx").graph.initializers
    for use in matrix_uses(graph):
        old = before[use.name].const_value
        assert old is not None
        assert use.source.const_value is not None
        values = tensor_array(use.source.const_value)
        assert values.dtype == np.float32
        assert (values == tensor_array(old)).all()


def test_an_export_of_an_export_is_the_same_model(exported: Path, tmp_path: Path) -> None:
    again = export_for_aimet(exported.parent, tmp_path / "again", SHAPE)
    tokens = list(range(2, 34))
    assert (logits(again, tokens) == logits(exported, tokens)).all()


@pytest.mark.variant
def test_the_command_writes_the_same(exported: Path, tiny: Path, tmp_path: Path) -> None:
    shape = ("--ar", str(SHAPE.ar), "--cl", str(SHAPE.cl))
    done = qnnfarm("export", tiny, "--out", tmp_path / "out", *shape, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == str(tmp_path / "out" / exported.name)
    for path in exported.parent.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own functions
def test_encodings_of_aimet_come_back(exported: Path, tmp_path: Path) -> None:
    """With aimet-onnx itself, where it is installed."""
    aimet_onnx: Any = pytest.importorskip("aimet_onnx", reason="pip install aimet-onnx")
    config = load_config(exported.parent / "config.json")
    rng = np.random.default_rng(4)
    windows = rng.integers(2, config.vocab_size, (4, 32)).tolist()
    simulation = aimet_onnx.QuantizationSimModel(
        onnx.load(exported),
        param_type="int4",
        activation_type="int16",
        providers=["CPUExecutionProvider"],
    )
    simulation.compute_encodings(list(feeds(exported, windows)))
    simulation.export(str(tmp_path), "aimet")
    encodings = load_encodings(tmp_path / "aimet.encodings")
    found = encodings.by_name()
    graph = load_model(exported).graph
    weights = {use.name: use.source for use in matrix_uses(graph)}
    assert weights.keys() <= found.keys()
    assert {found[name].stored_bits for name in weights} == {4}
    for name, source in weights.items():
        assert source.const_value is not None
        values = tensor_array(source.const_value)
        grid = weight_grid(found[name])
        steps = np.asarray(grid.scale).max()
        assert np.abs(grid.dequantize(grid.quantize(values)) - values).max() < steps
    complete = complete_encodings(exported, encodings, config, windows)
    assert {name: complete.by_name()[name].scale for name in weights} == {
        name: found[name].scale for name in weights
    }
    ours = logits(apply_encodings(exported, complete, exported.parent / "q.onnx"), windows[0])
    exact = logits(exported, windows[0])
    assert np.corrcoef(ours.ravel(), exact.ravel())[0, 1] > 0.9


def feeds(path: Path, windows: Iterable[list[int]]) -> Iterable[dict[str, Any]]:
    inputs = CallInputs(load_config(path.parent / "config.json"), SHAPE.cl)
    ports = read_ports(path).inputs
    empty = {name: np.zeros(port.shape, port.dtype) for name, port in ports.items()}
    for window in windows:
        yield {**empty, **inputs.at(SHAPE.ar, 0, window[: SHAPE.ar])}
