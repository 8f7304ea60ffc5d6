"""Parts of the importer: cache names, layout functions, encodings, heads."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.encodings.attachment import encoding_of, set_encoding
from buildlib.encodings.model import Encoding, asymmetric_encoding
from buildlib.graph.folding import Refusal, fold
from plugins.onnx_exports.array_layout import array_function
from plugins.onnx_exports.attention import Attention
from plugins.onnx_exports.elementwise import Elementwise
from plugins.onnx_exports.encoding_transfer import scale_encoding, union_encoding
from plugins.onnx_exports.head_rows import head_rows
from plugins.onnx_exports.probe import Probe
from plugins.onnx_exports.projections import Projections
from plugins.onnx_exports.resolver import ActivationResolver
from plugins.onnx_exports.roles import cache_name
from plugins.onnx_exports.root_tensors import Activation, RootTensors
from plugins.onnx_exports.symbolic_layout import SymbolicLayout
from plugins.onnx_exports.values import AbstractValue, AttentionScores, Concrete, LinearForm
from plugins.onnx_exports.writer import Writer

OPSET = 18


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("past_key_values.3.key", ("key", 3, None)),
        ("past_key_values.3.value", ("value", 3, None)),
        ("present.0.key", ("key", 0, None)),
        ("past_key_12_in", ("key", 12, None)),
        ("past_value_12_out", ("value", 12, None)),
        ("past_key_0_h5_in", ("key", 0, 5)),
        ("past_value_7_h0_in", ("value", 7, 0)),
        ("past_key_values.key_cache.2", ("key", 2, None)),
        ("past_key_values_value_cache_2", ("value", 2, None)),
        ("key_cache_4", ("key", 4, None)),
        ("layers.1.attention.v_cache", ("value", 1, None)),
        ("past_key_values.5", ("value", 2, None)),
        ("past_4", ("key", 2, None)),
        ("position_ids", None),
        ("logits", None),
    ],
)
def test_names_of_caches(name: str, role: tuple[str, int, int | None] | None) -> None:
    assert cache_name(name) == role


@st.composite
def moves(draw: st.DrawFn) -> tuple[ir.Node, npt.NDArray[Any], list[npt.NDArray[Any]]]:
    dims = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    array = np.arange(np.prod(dims), dtype=np.int64).reshape(dims)
    rank = len(dims)
    kind = draw(st.sampled_from(["Transpose", "Slice", "Unsqueeze", "Reshape", "Expand", "Tile"]))
    parameters: list[npt.NDArray[Any]] = []
    attributes: dict[str, Any] = {}
    if kind == "Transpose":
        attributes["perm"] = draw(st.permutations(range(rank)))
    elif kind == "Slice":
        bound = st.integers(-6, 6)
        step = draw(st.sampled_from([1, 2, -1]))
        parts = [draw(bound), draw(bound), draw(st.integers(-rank, rank - 1)), step]
        parameters = [np.array([part], dtype=np.int64) for part in parts]
    elif kind == "Unsqueeze":
        parameters = [np.array([draw(st.integers(-rank - 1, rank))], dtype=np.int64)]
    elif kind == "Reshape":
        target = [-1, *draw(st.permutations(dims))[: rank - 1]]
        parameters = [np.array(target, dtype=np.int64)]
    elif kind == "Expand":
        parameters = [np.array([2, *dims], dtype=np.int64)]
    else:
        parameters = [np.array(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))]
    values = [ir.Value(name=f"v{index}") for index in range(1 + len(parameters))]
    return ir.node(kind, values, attributes), array, parameters


@given(moves())
def test_layout_functions_follow_onnx(
    case: tuple[ir.Node, npt.NDArray[Any], list[npt.NDArray[Any]]],
) -> None:
    node, array, parameters = case
    moved = array_function(node, array.ndim, parameters)(array)
    (expected,) = fold(node, [array, *parameters], OPSET)
    np.testing.assert_array_equal(moved, expected)


ranges = st.tuples(st.floats(-100, 0), st.floats(0.01, 100))


@given(st.lists(ranges, min_size=1, max_size=4))
def test_a_union_of_grids_covers_each(bounds: list[tuple[float, float]]) -> None:
    grids = [asymmetric_encoding("x", low, high, 16) for low, high in bounds]
    joined = union_encoding(grids)
    assert joined is not None
    low, high = _range(joined)
    for grid in grids:
        assert low <= _range(grid)[0] + joined.scale[0]
        assert high >= _range(grid)[1] - joined.scale[0]


@given(ranges, st.floats(0.01, 10))
def test_a_negative_factor_mirrors_a_range(bounds: tuple[float, float], factor: float) -> None:
    grid = asymmetric_encoding("x", *bounds, 16)
    low, high = _range(grid)
    assert _range(scale_encoding(grid, -factor)) == pytest.approx((-factor * high, -factor * low))


def test_grids_of_other_widths_have_no_union() -> None:
    assert union_encoding([asymmetric_encoding("x", -1, 1, bits) for bits in (8, 16)]) is None


@pytest.mark.parametrize("half", [1, 4])
def test_pairs_of_a_rotary_embedding(half: int) -> None:
    """Halves are what Genie has tables for; neighbours as pairs are refused by name."""
    roots, dim = RootTensors(2), 8
    rows = roots.add(Activation(2 * dim, ir.Value(name="q"), dim, lambda: ir.Value(name="q")))
    own = np.arange(rows.size).reshape(2, dim)
    token_and_feature = np.arange(dim)
    partner = token_and_feature ^ 1 if half == 1 else (token_and_feature + half) % dim
    angle = np.outer([1.0, 2.0], 0.3 ** (np.minimum(token_and_feature, partner) % dim))
    sign = np.where(partner > token_and_feature, -1.0, 1.0)
    form = LinearForm((own, own[:, partner]), (np.cos(angle), sign * np.sin(angle)), varies=True)
    if half == 1:
        with pytest.raises(Refusal, match="interleaved"):
            head_rows(roots, form)
        return
    rotation = head_rows(roots, form).rotation
    assert rotation.width == dim
    assert rotation.scale == pytest.approx(1.0)
    np.testing.assert_allclose(rotation.cos, np.cos(angle)[:, :half])
    np.testing.assert_allclose(rotation.sin, np.sin(angle)[:, :half])


def test_scores_that_were_treated_differently_are_not_joined() -> None:
    values = [ir.Value(name=name) for name in "ab"]
    node = ir.node("Concat", values, {"axis": 0})
    plain = AttentionScores(np.arange(4), 16, origins=(("scores", values[0]),))
    other = AttentionScores(np.arange(4, 8), 16, origins=(("scores", values[1]),))
    moving = SymbolicLayout(RootTensors(4))
    joined = moving.concatenated(node, [plain, other])
    assert isinstance(joined, AttentionScores)
    assert [value for _, value in joined.origins] == values
    for wrong in (replace(other, masked=True), replace(other, scale=2.0)):
        with pytest.raises(Refusal, match="scaled or masked differently"):
            moving.concatenated(node, [plain, wrong])


@pytest.mark.parametrize("constant_first", [False, True])
def test_an_encoding_is_of_the_operand_that_it_belongs_to(constant_first: bool) -> None:
    roots = RootTensors(4)
    writer = Writer(roots)
    resolver = ActivationResolver(roots, writer, lambda _: pytest.fail("there is no attention"))
    projections = Projections(writer, resolver)
    attention = Attention(roots, Probe(4, 12, is_fixed=True))
    elementwise = Elementwise(writer, resolver, projections, attention)
    source = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    scaled, shift = ir.Value(name="scaled"), ir.Value(name="shift")
    set_encoding(scaled, asymmetric_encoding("scaled", -4.0, 4.0, 16))
    set_encoding(shift, asymmetric_encoding("shift", 0.0, 1.0, 8))
    rows = writer.activation(source, source, 8)
    form = roots.form_of(rows, (4, 8)).scaled(np.asarray(2.0), varies=False)
    pairs: list[tuple[ir.Value, AbstractValue]] = [(scaled, form), (shift, Concrete(np.ones(8)))]
    if constant_first:
        pairs.reverse()
    node = ir.node("Add", [value for value, _ in pairs], name="sum")
    elementwise.apply(node, [abstract for _, abstract in pairs])
    (product,) = (node for node in writer.builder.nodes if node.op_type == "Mul")
    encoding = encoding_of(product.outputs[0])
    assert encoding is not None
    assert encoding.bw == 16


def _range(grid: Encoding) -> tuple[float, float]:
    scale, offset = grid.scale[0], grid.offset[0]
    return scale * offset, scale * (offset + (1 << grid.bw) - 1)
