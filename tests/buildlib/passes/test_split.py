"""Parts in sequence compute the same as the model, wherever it is cut."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from buildlib.encodings.files import load_encodings
from buildlib.errors import ModelFileError
from buildlib.graph.files import load_model, save_model
from buildlib.numerics.runners import read_ports
from buildlib.passes.balance import SplitEnds, choose_splits
from buildlib.passes.split import split_model, weights_by_segment
from buildlib.quantize.qdq import apply_encodings
from tests.buildlib.passes.decoders import Kind, make_decoder, run_once


def run_chain(parts: list[Path], whole: Path) -> dict[str, npt.NDArray[np.float32]]:
    """What the parts give for the inputs that `run_once` gives the whole."""
    values: dict[str, npt.NDArray[np.float32]] = {}
    inputs = {p.name: p for p in ort.InferenceSession(str(whole)).get_inputs()}
    for name, port in inputs.items():
        rng = np.random.default_rng([0, *name.encode()])
        if port.type == "tensor(int32)":
            values[name] = rng.integers(0, 50, port.shape).astype(np.int32)
        else:
            values[name] = rng.normal(size=port.shape).astype(np.float32)
    for part in parts:
        session = ort.InferenceSession(str(part), providers=["CPUExecutionProvider"])
        feeds = {port.name: values[port.name] for port in session.get_inputs()}
        names = [port.name for port in session.get_outputs()]
        values |= dict(zip(names, session.run(None, feeds), strict=True))
    return {port.name: values[port.name] for port in ort.InferenceSession(str(whole)).get_outputs()}


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(("embedding", "embeds"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("inner", [1, 2, 4])
def test_parts_are_the_model_bit_by_bit(
    *, inner: int, embedding: bool, head: bool, embeds: bool, tmp_path: Path
) -> None:
    model = make_decoder(tmp_path / "in", Kind(layers=4, embeds=embeds, group=1))
    count = inner + embedding + head
    parts = split_model(
        model, count, tmp_path / "out", split_embedding=embedding, split_lm_head=head
    )
    assert [part.name for part in parts] == [
        f"ar4_cl12_{number}_of_{count}.onnx" for number in range(1, count + 1)
    ]
    found, expected = run_chain(parts, model), run_once(model)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert (tmp_path / "out" / "weights.bin").samefile(tmp_path / "in" / "weights.bin")
    if embedding:
        ports = read_ports(parts[0])
        assert (list(ports.inputs), list(ports.outputs)) == (["input_ids"], ["e"])
    if head:
        ports = read_ports(parts[-1])
        assert (list(ports.inputs), list(ports.outputs)) == (["layer_3_output"], ["logits"])


def test_quantized_parts_with_ends_apart(tiny_export: Path, tmp_path: Path) -> None:
    encodings = load_encodings(tiny_export / "model.encodings")
    model = apply_encodings(tiny_export / "model.onnx", encodings, tmp_path / "model.onnx")
    parts = split_model(model, 4, tmp_path / "out", split_embedding=True, split_lm_head=True)
    ports = [read_ports(part) for part in parts]
    assert list(ports[0].outputs) == list(ports[1].inputs)[:1]
    assert [next(iter(p.inputs)) for p in ports[2:]] == ["layer_0_output", "layer_1_output"]
    assert all(next(iter(p.outputs.values())).dtype == np.uint16 for p in ports)


def test_encodings_go_with_their_tensors(tiny_export: Path, tmp_path: Path) -> None:
    parts = split_model(tiny_export / "model.onnx", 2, tmp_path)
    whole = load_encodings(tiny_export / "model.encodings").by_name()
    found = [load_encodings(part.with_suffix(".encodings")).by_name() for part in parts]
    assert found[0] | found[1] == whole
    assert "layer_0_output" in found[0].keys() & found[1].keys()
    assert "layer_1_scores" not in found[0]


def test_sizes_are_those_of_the_encodings(tiny_export: Path) -> None:
    weights = weights_by_segment(tiny_export / "model.onnx")
    assert sum(weights.layers[0].values()) == pytest.approx(
        40 * (72 + 24 * 2 + 72 + 3 * 72), rel=0.05
    )
    assert weights.embedding["model.embed_tokens.weight"] == 300 * 40 * 2
    assert sum(weights.head.values()) == pytest.approx(300 * 40, rel=0.05)
    assert choose_splits(weights, 1 << 20) == 1
    assert choose_splits(weights, 24_500, SplitEnds(embedding=True, head=True)) == 4


def test_parts_and_wrong_models_are_refused(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "in", Kind())
    parts = split_model(model, 2, tmp_path / "in")
    for part in parts:
        with pytest.raises(ModelFileError, match="is missing"):
            split_model(part, 1, tmp_path / "out")
    embeds = make_decoder(tmp_path / "embeds", Kind(embeds=True))
    with pytest.raises(ModelFileError, match="no embedding to split off"):
        split_model(embeds, 3, tmp_path / "out", split_embedding=True)
    assert not (tmp_path / "out").exists()


def test_a_cycle_is_an_error_of_one_line(tmp_path: Path) -> None:
    loaded = load_model(make_decoder(tmp_path / "in", Kind()))
    nodes = {str(node.name): node for node in loaded.graph}
    nodes["layer_0_scores"].replace_input_with(0, nodes["layer_1_output"].outputs[0])
    path = save_model(loaded, tmp_path / "in" / "cycle.onnx")
    with pytest.raises(ModelFileError) as caught:
        split_model(path, 2, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_layers_that_share_caches_cannot_be_parted(tmp_path: Path) -> None:
    loaded = load_model(make_decoder(tmp_path / "in", Kind()))
    nodes = {str(node.name): node for node in loaded.graph}
    nodes["layer_1_scores"].replace_input_with(1, nodes["layer_0_keys"].outputs[0])
    path = save_model(loaded, tmp_path / "in" / "shared.onnx")
    with pytest.raises(ModelFileError, match="no single value connects layer 0 and layer 1"):
        split_model(path, 2, tmp_path / "out")


def test_a_value_made_twice_is_refused(tmp_path: Path) -> None:
    loaded = load_model(make_decoder(tmp_path / "in", Kind()))
    value = next(node for node in loaded.graph if node.name == "layer_1_keys").outputs[0]
    value.name = "layer_0_keys"
    proto = ir.to_proto(loaded)
    path = tmp_path / "in" / "twice.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelFileError) as caught:
        split_model(path, 2, tmp_path / "out")
    assert "\n" not in str(caught.value)
