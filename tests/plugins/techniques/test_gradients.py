"""Layers of every family in numpy: values are ONNX Runtime's, gradients those of differences."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.errors import InvalidOptionError
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.shape import GraphShape
from buildlib.numerics.runners import OnnxRunner
from buildlib.numerics.segment_loop import SegmentLoop
from plugins.techniques.gradients import Array, Differentiable
from tests.buildlib import families

# One for each form of norm, activation, rotation and attention.
FAMILIES = ("llama-biases", "gemma2", "phi3", "qwen3-yarn", "olmo2", "stablelm-parallel")


@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_of_a_layer(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(families.write_checkpoint(tmp_path, families.load_family(name)[0]))
    path = export_onnx(checkpoint, GraphShape(4, 12), tmp_path / "out")
    rng = np.random.default_rng(1)
    with SegmentLoop(path, checkpoint.config, [[3, 4, 5, 6]]) as loop:
        model, inputs = loop.segment(1), loop.inputs_at(2, [3, 4, 5, 6])
    runner = OnnxRunner(save_model(model, tmp_path / "layer.onnx"))
    ports = runner.ports
    feeds = ports.feeds(
        {
            key: inputs.get(key, rng.normal(size=port.shape).astype(np.float32))
            for key, port in ports.inputs.items()
        }
    )
    weights = {
        str(value.name): tensor_array(value.const_value).astype(np.float32)
        for value in model.graph.initializers.values()
        if value.const_value is not None and str(value.name).endswith("proj.weight")
    }
    layer = Differentiable(model.graph, weights)
    after = next(key for key in ports.outputs if not key.startswith("past"))
    values = layer.forward(feeds, weights)
    np.testing.assert_allclose(values[after], runner.run(feeds)[after], rtol=0, atol=2e-5)
    onto = rng.normal(size=values[after].shape).astype(np.float32)
    grads = layer.backward(values, after, onto)
    assert grads.keys() == weights.keys()
    for key, weight in weights.items():
        step = (0.01 * rng.normal(size=weight.shape) * np.abs(weight).mean()).astype(np.float32)

        def along(part: float, key: str = key, weight: Array = weight, step: Array = step) -> float:
            moved = layer.forward(feeds, weights | {key: weight + part * step})
            return float((moved[after] * onto).sum(dtype=np.float64))

        expected = (along(1) - along(-1)) / 2
        scale = float(np.linalg.norm(grads[key]) * np.linalg.norm(step))
        assert abs(float((grads[key] * step).sum()) - expected) < 0.003 * scale, key


def test_other_operators_are_refused_by_name(tmp_path: Path) -> None:
    node = helper.make_node("Erf", ["x"], ["y"], "erf")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    onnx.save(helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:])), tmp_path / "m")
    with pytest.raises(InvalidOptionError, match=r"adascale cannot be used: no gradient of Erf"):
        Differentiable(load_model(tmp_path / "m").graph, ())
