"""Separate heads compute the same as joint heads, on the same bytes of weights."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.encodings.model import Encoding, Encodings, asymmetric_encoding
from buildlib.errors import EncodingsError, ModelFileError
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.shape import GraphShape
from buildlib.numerics.runners import read_ports
from buildlib.passes.arcl import convert_arcl
from buildlib.passes.mha2sha import convert_mha2sha
from buildlib.passes.split import split_model
from buildlib.quantize.qdq import apply_encodings
from tests.buildlib.onnx_models import assert_near, run_once
from tests.buildlib.passes.decoders import Kind, make_decoder

KINDS = {
    "grouped": Kind(),
    "multi-head": Kind(n_kv=3, group=1),
    "multi-query": Kind(n_kv=1, group=4),
    "one head": Kind(n_kv=1, group=1),
    "fused, split": Kind(fused="Split", bias="Gemm"),
    "fused, sliced": Kind(fused="Slice", bias="Add"),
    "fused, by input": Kind(fused="Split", by_output=False, bias="Add"),
    "bias": Kind(bias="Gemm"),
    "bias added": Kind(bias="Add", scale="scores"),
    "by input": Kind(by_output=False),
    "by input with bias": Kind(by_output=False, bias="Gemm", scale=None),
    "norm of heads": Kind(qk_norm=True),
    "partly rotated": Kind(rotated=4, softcap=True),
    "half precision": Kind(stored="F16", bias="Gemm", fused="Split"),
    "bfloat": Kind(stored="BF16", bias="Add"),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_of_attention_computes_the_same(kind: Kind, tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "in", kind)
    apart = convert_mha2sha(model, tmp_path / "out" / "model.onnx")
    assert_near(run_once(apart), run_once(model))
    graph = onnx.load(apart, load_external_data=False).graph
    operands = {name for node in graph.node for name in node.input}
    assert {tensor.name for tensor in graph.initializer} <= operands  # nothing joint is left
    attentions = [node for node in graph.node if node.op_type == "Softmax"]
    assert len(attentions) == kind.layers * kind.n_kv * kind.group
    assert (tmp_path / "out" / "weights.bin").samefile(model.parent / "weights.bin")
    products = sum(node.op_type == "Gemm" for node in graph.node)
    if kind.by_output and kind.n_kv * kind.group > 1:
        cut = kind.layers * kind.n_kv * (kind.group + 2)
        assert products == cut + kind.layers


@settings(max_examples=15, deadline=None)
@given(
    kind=st.builds(
        Kind,
        n_kv=st.integers(1, 4),
        group=st.integers(1, 4),
        head_dim=st.sampled_from([4, 6]),
        rotated=st.sampled_from([2, 4]),
        layers=st.just(1),
        fused=st.sampled_from([None, "Split", "Slice"]),
        by_output=st.booleans(),
        bias=st.sampled_from([None, "Gemm", "Add"]),
        qk_norm=st.booleans(),
        scale=st.sampled_from([None, "query", "scores"]),
        softcap=st.booleans(),
        stored=st.sampled_from(["F16", "F32"]),
        embeds=st.booleans(),
    ),
    ar=st.sampled_from([1, 2, 5]),
)
def test_any_mixture_of_kinds_computes_the_same(
    kind: Kind, ar: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    model = make_decoder(folder / "in", kind, GraphShape(ar, 10))
    apart = convert_mha2sha(model, folder / "out" / "model.onnx")
    assert_near(run_once(apart), run_once(model))


def test_weights_are_sliced_by_offset(tmp_path: Path) -> None:
    kind = Kind(fused="Split", bias="Gemm", stored="F16")
    model = make_decoder(tmp_path / "in", kind)
    apart = load_model(convert_mha2sha(model, tmp_path / "out" / "model.onnx"))
    whole = load_model(model).graph.initializers["layer_0_qkv.weight"].const_value
    assert whole is not None
    rows = tensor_array(whole)
    pieces = {
        name: tensor_array(value.const_value)
        for name, value in apart.graph.initializers.items()
        if name.startswith("layer_0_qkv.weight")
        and isinstance(value.const_value, ir.ExternalTensor)
    }
    assert len(pieces) == kind.n_kv * (kind.group + 2)
    for name, piece in pieces.items():
        start, stop = map(int, name.split("_rows_")[1].split("_"))
        np.testing.assert_array_equal(piece, rows[start:stop])
    together = [pieces[f"layer_0_qkv.weight_rows_{n}_{n + 8}"] for n in range(0, len(rows), 8)]
    np.testing.assert_array_equal(np.concatenate(together), rows)


def test_it_commutes_with_the_other_passes(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "in", Kind(layers=3))
    shape = GraphShape(2, 16)
    expected = run_once(convert_arcl(model, shape, tmp_path / "plain" / "model.onnx"))
    early = convert_mha2sha(model, tmp_path / "early" / "model.onnx")
    early = convert_arcl(early, shape, tmp_path / "early" / "other.onnx")
    assert_near(run_once(early), expected)
    again = convert_mha2sha(early, tmp_path / "again" / "model.onnx")
    assert_near(run_once(again), expected)
    late = convert_arcl(model, shape, tmp_path / "late" / "model.onnx")
    by_parts = [
        run_once(convert_mha2sha(part, tmp_path / "parts" / part.name))
        for part in split_model(late, 3, tmp_path / "late")
    ]
    apart_first = [run_once(part) for part in split_model(early, 3, tmp_path / "early")]
    for one, other in zip(by_parts, apart_first, strict=True):
        assert_near(one, other)


def test_parts_without_attention_pass_unchanged(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "in", Kind())
    part, *_ = split_model(model, 3, tmp_path / "in", split_embedding=True)
    assert convert_mha2sha(part, tmp_path / part.name).read_bytes() == part.read_bytes()


def per_channel(name: str, rows: int) -> Encoding:
    return Encoding(
        name=name, dtype="INT", enc_type="PER_CHANNEL", bw=8, is_sym=True,
        scale=tuple(0.001 * (1 + row) for row in range(rows)), offset=(-128,) * rows,
    )  # fmt: skip


def lpbq(name: str, rows: int, blocks: int) -> Encoding:
    return Encoding(
        name=name, dtype="INT", enc_type="LPBQ", bw=8, compressed_bw=4, block_size=4, is_sym=True,
        scale=tuple(0.001 * (1 + row) for row in range(rows)), offset=(-128,) * rows,
        per_block_int_scale=bytes(1 + n % 16 for n in range(rows * blocks)),
    )  # fmt: skip


def save_beside(model: Path, weight: Encoding, *activations: Encoding) -> None:
    encodings = Encodings(activation_encodings=activations, param_encodings=(weight,))
    save_encodings(encodings, model.with_suffix(".encodings"))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("blocks", [0, 6])
def test_channels_keep_their_grids(*, blocks: int, fused: bool, tmp_path: Path) -> None:
    kind = Kind(fused="Split" if fused else None)
    model = make_decoder(tmp_path / "in", kind)
    name = "layer_1_qkv.weight" if fused else "layer_1_q.weight"
    rows = 8 * kind.n_kv * (kind.group + 2 * fused)
    whole = lpbq(name, rows, blocks) if blocks else per_channel(name, rows)
    scaled = asymmetric_encoding("layer_1_q_scaled", -1, 1, 16)
    save_beside(model, whole, scaled)
    apart = convert_mha2sha(model, tmp_path / "out.onnx")
    encodings = load_encodings(apart.with_suffix(".encodings")).by_name()
    pieces = [encodings[f"{name}_rows_{start}_{start + 8}"] for start in range(0, rows, 8)]
    assert tuple(scale for piece in pieces for scale in piece.scale) == whole.scale
    assert b"".join(piece.per_block_int_scale for piece in pieces) == whole.per_block_int_scale
    assert {(piece.enc_type, piece.block_size) for piece in pieces} == {
        (whole.enc_type, whole.block_size)
    }
    heads = [encodings[f"layer_1_q_scaled_head_{head}"] for head in range(kind.n_kv * kind.group)]
    assert {encoding.scale for encoding in heads} == {scaled.scale}
    assert len(encodings) == len(heads) + len(pieces)


def test_encodings_of_other_channels_are_refused(tmp_path: Path) -> None:
    model = make_decoder(tmp_path / "in", Kind())
    save_beside(model, per_channel("layer_0_q.weight", 7))
    with pytest.raises(EncodingsError, match=r"layer_0_q\.weight"):
        convert_mha2sha(model, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_quantized_it_computes_the_same_bit_by_bit(tiny_export: Path, tmp_path: Path) -> None:
    results = []
    for name in ("together", "apart"):
        folder = tmp_path / name
        model = tiny_export / "model.onnx"
        if name == "apart":
            model = convert_mha2sha(model, folder / "model.onnx")
        encodings = load_encodings(model.with_suffix(".encodings"))
        quantized = apply_encodings(model, encodings, folder / "model.qdq.onnx")
        results.append(run_once(quantized))
        assert read_ports(quantized).inputs["past_key_0_in"].dtype == np.uint8
    together, apart = results
    for output, values in together.items():
        np.testing.assert_array_equal(apart[output], values, err_msg=output)


def test_a_head_count_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    """Six heads of queries that the graph broadcasts over one of keys at a time."""
    model = load_model(make_decoder(tmp_path / "in", Kind(n_kv=6, group=1, layers=1)))
    wrong = load_model(make_decoder(tmp_path / "other", Kind(n_kv=4, group=1, layers=1)))
    for name in ("past_key_0_in", "past_value_0_in"):
        value = next(value for value in model.graph.inputs if value.name == name)
        value.shape = next(v for v in wrong.graph.inputs if v.name == name).shape
    path = save_model(model, tmp_path / "in" / "wrong.onnx")
    with pytest.raises(ModelFileError, match="joins 6 heads with 4: the head count does not"):
        convert_mha2sha(path, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    ("op_type", "attributes", "said"),
    [
        ("Softmax", {"axis": 0}, "Softmax layer_0_weights works across heads"),
        ("CumSum", {}, "CumSum layer_0_weights cannot be split by head"),
        ("LogSoftmax", {"axis": -1}, "LogSoftmax layer_0_weights cannot be split by head"),
    ],
)
def test_operators_that_mix_heads_are_named(
    op_type: str, attributes: dict[str, int], said: str, tmp_path: Path
) -> None:
    model = load_model(make_decoder(tmp_path / "in", Kind(layers=2)))
    node = next(node for node in model.graph if node.op_type == "Softmax")
    node.op_type = op_type
    node.attributes.clear()
    for name, number in attributes.items():
        node.attributes.add(ir.AttrInt64(name, number))
    path = save_model(model, tmp_path / "in" / "wrong.onnx")
    with pytest.raises(ModelFileError, match=said) as caught:
        convert_mha2sha(path, tmp_path / "out.onnx")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.onnx").exists()


def test_a_quantized_model_is_refused(tiny_export: Path, tmp_path: Path) -> None:
    encodings = load_encodings(tiny_export / "model.encodings")
    quantized = apply_encodings(tiny_export / "model.onnx", encodings, tmp_path / "q.onnx")
    with pytest.raises(ModelFileError, match="it is a float model"):
        convert_mha2sha(quantized, tmp_path / "out.onnx")
