"""Parts in sequence compute the same as the model, wherever it is cut."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from buildlib.encodings.files import load_encodings
from buildlib.errors import InvalidOptionError, ModelFileError
from buildlib.graph.files import load_model
from buildlib.numerics.runners import read_ports
from buildlib.passes.balance import SplitEnds, choose_splits
from buildlib.passes.split import split_model, weights_by_segment
from buildlib.quantize.qdq import apply_encodings
from tests.buildlib.onnx_models import Arrays, random_feeds, run_once
from tests.buildlib.passes.decoders import Kind, make_decoder


def assert_chain_equals(parts: list[Path], whole: Path) -> None:
    """Check that parts, each fed by those before it, compute what the whole does."""
    values: Arrays = random_feeds(whole)
    for part in parts:
        values |= run_once(part, values)
    for name, expected in run_once(whole).items():
        np.testing.assert_array_equal(values[name], expected, err_msg=name)


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
    assert_chain_equals(parts, model)
    assert (tmp_path / "out" / "weights.bin").samefile(tmp_path / "in" / "weights.bin")
    if embedding:
        ports = read_ports(parts[0])
        assert (list(ports.inputs), list(ports.outputs)) == (["input_ids"], ["e"])
    if head:
        ports = read_ports(parts[-1])
        assert (list(ports.inputs), list(ports.outputs)) == (["layer_3_output"], ["logits"])


def test_quantized_parts_are_the_model_and_parts_that_are_quantized(
    tiny_export: Path, tmp_path: Path
) -> None:
    source = tiny_export / "model.onnx"
    encodings = load_encodings(source.with_suffix(".encodings"))
    whole = apply_encodings(source, encodings, tmp_path / "whole.onnx")
    parts = split_model(whole, 4, tmp_path / "out", split_embedding=True, split_lm_head=True)
    ports = [read_ports(part) for part in parts]
    assert list(ports[0].outputs) == list(ports[1].inputs)[:1]
    assert [next(iter(p.inputs)) for p in ports[2:]] == ["layer_0_output", "layer_1_output"]
    assert all(next(iter(p.outputs.values())).dtype == np.uint16 for p in ports)
    assert_chain_equals(parts, whole)
    later = [
        apply_encodings(part, encodings, tmp_path / f"{part.stem}.qdq.onnx")
        for part in split_model(source, 2, tmp_path)
    ]
    assert_chain_equals(later, whole)


def test_encodings_go_with_their_tensors(tiny_export: Path, tmp_path: Path) -> None:
    parts = split_model(tiny_export / "model.onnx", 2, tmp_path)
    whole = load_encodings(tiny_export / "model.encodings").by_name()
    one, two = (load_encodings(part.with_suffix(".encodings")).by_name() for part in parts)
    assert one | two == whole
    assert "layer_0_output" in one.keys() & two.keys()
    assert "layer_1_scores" not in one


def test_sizes_are_those_of_the_encodings(tiny_export: Path) -> None:
    weights = weights_by_segment(tiny_export / "model.onnx")
    layer = 40 * (72 + 24 * 2 + 72 + 3 * 72)
    assert sum(weights.layers[0].values()) == pytest.approx(layer, rel=0.05)
    assert weights.embedding["model.embed_tokens.weight"] == 300 * 40 * 2
    assert sum(weights.head.values()) == pytest.approx(300 * 40, rel=0.05)
    assert choose_splits(weights, 1 << 20) == 1
    assert choose_splits(weights, 24_500, SplitEnds(embedding=True, head=True)) == 4


def test_parts_and_wrong_models_are_refused(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "in", Kind())
    parts = split_model(model, 2, tmp_path / "in")
    for part, name in zip(parts, ("logits", "input_ids"), strict=True):
        with pytest.raises(ModelFileError, match=f"{name} is missing"):
            split_model(part, 1, tmp_path / "out")
    with pytest.raises(InvalidOptionError, match="3 parts cannot be made of 2 layers"):
        split_model(model, 3, tmp_path / "out")
    embeds = make_decoder(tmp_path / "embeds", Kind(embeds=True))
    with pytest.raises(ModelFileError, match="no embedding to split off"):
        split_model(embeds, 3, tmp_path / "out", split_embedding=True)
    assert not (tmp_path / "out").exists()


def cycle(nodes: dict[str, ir.Node]) -> None:
    nodes["layer_0_scores"].replace_input_with(0, nodes["layer_1_output"].outputs[0])


def layers_that_share_caches(nodes: dict[str, ir.Node]) -> None:
    nodes["layer_1_scores"].replace_input_with(1, nodes["layer_0_keys"].outputs[0])


def value_made_twice(nodes: dict[str, ir.Node]) -> None:
    nodes["layer_1_keys"].outputs[0].name = "layer_0_keys"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (cycle, "uses .* before it is made"),
        (layers_that_share_caches, "no single value connects layer 0 and layer 1"),
        (value_made_twice, "not a readable ONNX model"),
    ],
)
def test_graphs_that_cannot_be_parted_are_refused(
    change: Callable[[dict[str, ir.Node]], None], reason: str, tmp_path: Path
) -> None:
    model = load_model(make_decoder(tmp_path / "in", Kind()))
    change({str(node.name): node for node in model.graph})
    path = tmp_path / "in" / "changed.onnx"
    path.write_bytes(ir.to_proto(model).SerializeToString())
    with pytest.raises(ModelFileError, match=reason) as caught:
        split_model(path, 2, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
