"""Costs by operator: names and nodes of the real profile, bytes, and the loss against floats."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from buildlib.builder.build import BuildOutputs
from buildlib.checkpoint.config import load_config
from buildlib.container.container import GenAIContainer
from buildlib.graph.files import load_model
from plugins.diagnosis.operator_costs import (
    _dequantized,
    emulator_cycles,
    operator_costs,
    operator_name,
    total_by_kind,
    total_by_layer,
)
from suites.models import tiny_llama
from tests.buildlib.onnx_models import model_of


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("layer_0_q_proj_columns_24_48:OpId_29 (cycles)", "layer_0_q_proj"),
        ("layer_3_q_second_sin_head_11:OpId_2 (cycles)", "layer_3_q_second_sin"),
        ("layer_0_v_proj_columns_24_48_dq_2:OpId_32 (cycles)", "layer_0_v_proj"),
        ("lm_head:OpId_1526 (cycles)", "lm_head"),
        ("Input OpId_2 (cycles)", "Input"),
        ("OpId_24 (cycles)", "(no name)"),
        ("past_key_0_out_head_1:OpId_71", "past_key_0_out"),
    ],
)
def test_a_compiled_node_belongs_to_an_operator_of_the_model(node: str, name: str) -> None:
    assert operator_name(node) == name


def test_costs_of_the_reference_model(build_cache: Path, reference_outputs: BuildOutputs) -> None:
    container = GenAIContainer.load(reference_outputs.container)
    cycles = emulator_cycles(container, cache_root=build_cache, repetitions=1)
    costs, missing = operator_costs(container, cycles, cache_root=build_cache)
    assert missing == ""
    assert set(costs) == {"ar1_cl192", "ar32_cl192"}
    decode = costs["ar1_cl192"]
    layers = total_by_layer(decode)
    weights = {name: cost for name, cost in decode.items() if cost.weight_bytes}
    config = load_config(tiny_llama.folder() / "config.json")
    assert {f"layer_{i}" for i in range(config.num_hidden_layers)} <= set(layers)
    assert decode["layer_0_up_proj"].cycles > decode["layer_0_q_second_sin"].cycles
    projections = [total_by_kind(decode)[f"{name}_proj"] for name in ("q", "k", "v", "o")]
    assert all(35 < (one.sqnr_db or 0) < 55 for one in projections)  # 8 bits, 6 dB each
    size = config.hidden_size * config.intermediate_size
    assert weights["layer_0_up_proj"].weight_bytes == size
    nothing, missing = operator_costs(container, cycles, cache_root=build_cache / "none")
    assert "build the container again" in missing
    assert sum(cost.weight_bytes for cost in nothing["ar1_cl192"].values()) == 0


@pytest.mark.parametrize("kind", ["int8", "uint8", "int4", "uint4", "blocks"])
def test_weights_are_dequantized_as_onnx_runtime_does(tmp_path: Path, kind: str) -> None:
    rng, shape = np.random.default_rng(3), (6, 32)
    dtype = np.dtype(getattr(ml_dtypes, kind)) if "4" in kind else np.dtype("int8")
    dtype = np.dtype("uint8") if kind == "uint8" else dtype
    low, high = (0, 16) if kind == "uint4" else (-8, 8)
    stored = rng.integers(low, high, shape).astype(dtype)
    channels = 6 if kind != "blocks" else (6, 2)
    scale = rng.uniform(0.01, 0.1, channels).astype(np.float32)
    zero = rng.integers(0, 4, channels).astype(dtype)
    constants = {"w_q": stored, "scale": scale, "zero": zero}
    attributes: dict[str, Any] = {"axis": 1, "block_size": 16} if kind == "blocks" else {"axis": 0}
    nodes = [
        helper.make_node("DequantizeLinear", ["w_q", "scale", "zero"], ["w"], **attributes),
        helper.make_node("Add", ["x", "w"], ["y"], name="add"),
    ]
    path = tmp_path / "model.onnx"
    model = model_of(nodes, {"x": (np.float32, shape)}, {"y": (np.float32, shape)}, constants)
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    (true,) = ort.InferenceSession(path).run(None, {"x": np.zeros(shape, np.float32)})
    (add,) = (node for node in load_model(path).graph if node.name == "add")
    weight = add.inputs[1]
    assert weight is not None
    np.testing.assert_allclose(_dequantized(weight), true, rtol=1e-6)
