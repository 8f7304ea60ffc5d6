"""A model in mllm's contract computes the same, from and to tensors as mllm hands them over."""

from pathlib import Path

import numpy as np
import pytest

from buildlib.errors import ModelFileError
from buildlib.graph.files import load_model
from buildlib.graph.values import static_shape
from plugins.mllm.graph_contract import MllmContract
from tests.buildlib.onnx_models import run_once
from tests.buildlib.passes.decoders import SHAPE, Kind, make_decoder

AR, CL, FREE, HALF = SHAPE.ar, SHAPE.cl, SHAPE.past, 4
ROTATIONS = np.random.default_rng(3).normal(size=(2, CL + AR, HALF)).astype(np.float32)


def adapt(folder: Path, kind: Kind) -> tuple[Path, Path]:
    plain = make_decoder(folder / "in", kind)
    return plain, MllmContract(*ROTATIONS).run(plain, folder / "out" / "model.onnx")


def test_inputs_and_outputs_stand_in_the_order_of_the_runner(tmp_path: Path) -> None:
    """Shapes and order: `init_io` of mllm's PromptProcessor.cpp at b9c3070."""
    _, path = adapt(tmp_path, Kind(layers=11))
    graph = load_model(path).graph
    layers = range(11)
    assert [(value.name, static_shape(value)) for value in graph.inputs] == [
        ("input_ids", (1, AR)),
        ("position_ids", (AR,)),
        ("attention_mask", (1, 1, AR, CL)),
        *((f"past_key_{layer}", (1, 2, 8, FREE)) for layer in layers),
        *((f"past_value_{layer}", (1, 2, FREE, 8)) for layer in layers),
    ]
    assert [(value.name, static_shape(value)) for value in graph.outputs] == [
        ("logits", (1, 1, AR, 50)),
        *((f"present_key_{layer}", (1, 2, 8, AR)) for layer in layers),
        *((f"present_value_{layer}", (1, 2, AR, 8)) for layer in layers),
    ]


@pytest.mark.parametrize("positions", [range(AR), [7, 8, 9, CL + 1]])
def test_it_computes_the_same(positions: list[int], tmp_path: Path) -> None:
    kind = Kind()
    plain, path = adapt(tmp_path, kind)
    rng = np.random.default_rng(1)
    own = {
        "input_ids": rng.integers(0, kind.vocab, (1, AR)).astype(np.int32),
        "attention_mask": rng.normal(size=(1, 1, AR, CL)).astype(np.float32),
    }
    caches = {
        f"past_{which}_{layer}": rng.normal(size=(1, 2, *dims)).astype(np.float32)
        for layer in range(kind.layers)
        for which, dims in (("key", (8, FREE)), ("value", (FREE, 8)))
    }
    actual = run_once(path, {**own, **caches, "position_ids": np.array(positions, np.int32)})
    inputs = {f"{name}_in": np.swapaxes(values, 0, 1) for name, values in caches.items()}
    for name, table in zip(("cos", "sin"), ROTATIONS, strict=True):
        inputs[f"position_ids_{name}"] = table[np.array(positions)][None, None]
    expected = run_once(plain, {**own, **inputs})
    np.testing.assert_array_equal(actual.pop("logits")[0], expected.pop("logits"))
    for name, values in expected.items():
        mllms = actual.pop(name.replace("past", "present").removesuffix("_out"))
        np.testing.assert_array_equal(mllms, np.swapaxes(values, 0, 1))
    assert not actual


def test_a_model_without_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="it takes inputs_embeds"):
        adapt(tmp_path, Kind(embeds=True))
    assert not (tmp_path / "out").exists()
