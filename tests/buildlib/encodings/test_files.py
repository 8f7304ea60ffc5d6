"""Encodings files in AIMET's formats: contents, conversion, and damage."""

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.encodings.model import Encoding, Encodings, EncType
from buildlib.errors import EncodingsError
from tests.fuzz.mutations import change_json
from tests.system import is_here

LEGACY: dict[str, Any] = {
    "version": "0.6.1",
    "activation_encodings": {
        "x": [{
            "bitwidth": 8, "dtype": "int", "is_symmetric": "False", "max": 2.6086959838867188,
            "min": -2.109158515930176, "offset": -114.0, "scale": 0.018501389771699905,
        }],
        "y": [{"bitwidth": 16, "dtype": "float"}],
    },
    "param_encodings": {
        "w": [
            {"bitwidth": 4, "dtype": "int", "is_symmetric": "True", "offset": -8, "scale": 0.5},
            {"bitwidth": 4, "dtype": "int", "is_symmetric": "True", "offset": -8, "scale": 0.25},
        ],
    },
}  # fmt: skip

LISTS: dict[str, Any] = {
    "version": "1.0.0",
    "activation_encodings": [
        {"name": "x", "dtype": "INT", "enc_type": "PER_TENSOR", "bw": 16, "is_sym": False,
         "scale": [0.5], "offset": [-3]},
        {"name": "y", "dtype": "FLOAT", "enc_type": "PER_TENSOR", "bw": 16},
    ],
    "param_encodings": [
        {"name": "w", "dtype": "INT", "enc_type": "LPBQ", "bw": 8, "compressed_bw": 4,
         "is_sym": True, "block_size": 32, "scale": [0.001, 0.002, 0.003], "offset": [-128] * 3,
         "per_block_int_scale": [3, 5, 11, 9, 7, 16]},
        {"name": "v", "dtype": "INT", "enc_type": "PER_BLOCK", "bw": 4, "is_sym": True,
         "block_size": 64, "scale": [0.1, 0.2, 0.3, 0.4], "offset": [-8] * 4},
    ],
}  # fmt: skip

ONNX_LIKE: dict[str, Any] = {
    "version": "2.0.0",
    "encodings": [
        {"name": "x", "y_scale": 0.01, "y_zero_point": 41, "output_dtype": "uint8"},
        {"name": "s", "y_scale": 0.01, "output_dtype": "int16"},
        {"name": "c", "y_scale": [0.01, 0.02, 0.03], "axis": 0, "output_dtype": "int8"},
        {"name": "b", "y_scale": [[0.01, 0.02], [0.03, 0.04], [0.05, 0.06]], "axis": 1,
         "block_size": 32, "output_dtype": "int4"},
        {"name": "w", "per_block_int_scale": [[3, 5], [11, 9], [7, 16]], "axis": 1,
         "per_channel_float_scale": [[0.001], [0.002], [0.003]], "block_size": 32,
         "output_dtype": "int4"},
        {"name": "t", "per_block_int_scale": [[3, 11, 7], [5, 9, 16]], "axis": 0,
         "per_channel_float_scale": [[0.001, 0.002, 0.003]], "block_size": 32,
         "output_dtype": "int4"},
        {"name": "f", "output_dtype": "bfloat16"},
    ],
}  # fmt: skip

LATEST: dict[str, Any] = {
    "version": "2.1.0",
    "encodings": [
        {"name": "w", "y_scale": {"x": [[3, 5], [11, 9], [7, 16]], "axis": 0,
                                  "x_scale": [0.001, 0.002, 0.003]},
         "axis": 1, "block_size": 32, "output_dtype": "int4"},
    ],
}  # fmt: skip

OTHERS = pytest.mark.needs("plugins.onnx_exports")
EXAMPLES = (LEGACY, LISTS, ONNX_LIKE, LATEST) if is_here("plugins.onnx_exports") else (LISTS,)
FACTORS = bytes([3, 5, 11, 9, 7, 16])


def load(folder: Path, data: object) -> Encodings:
    path = folder / "model.encodings"
    path.write_text(json.dumps(data))
    return load_encodings(path)


@OTHERS
def test_0_6_1_has_lists_by_name(tmp_path: Path) -> None:
    found = load(tmp_path, LEGACY).by_name()
    assert (found["x"].bw, found["x"].offset, found["x"].is_sym) == (8, (-114,), False)
    assert found["y"].dtype == "FLOAT"
    assert (found["w"].enc_type, found["w"].scale) == ("PER_CHANNEL", (0.5, 0.25))
    assert found["w"].is_sym


@OTHERS
def test_2_0_0_says_the_same_as_quantize_linear(tmp_path: Path) -> None:
    found = load(tmp_path, ONNX_LIKE).by_name()
    assert (found["x"].offset, found["x"].is_sym) == ((-41,), False)
    assert (found["s"].offset, found["s"].is_sym) == ((-32768,), True)
    assert (found["c"].enc_type, found["c"].axis) == ("PER_CHANNEL", 0)
    assert (found["b"].scale, found["b"].channels) == ((0.01, 0.02, 0.03, 0.04, 0.05, 0.06), 3)
    assert (found["f"].dtype, found["f"].bw) == ("FLOAT", 16)
    for name, axes in (("w", (0, 1)), ("t", (1, 0))):
        encoding = found[name]
        assert (encoding.axis, encoding.block_axis) == axes
        assert (encoding.bw, encoding.stored_bits, encoding.block_size) == (8, 4, 32)
        assert encoding.scale == (0.001, 0.002, 0.003)
        assert encoding.per_block_int_scale == FACTORS


@OTHERS
def test_lpbq_is_the_same_in_every_format_that_has_it(tmp_path: Path) -> None:
    found = [load(tmp_path, data).by_name()["w"] for data in (LISTS, ONNX_LIKE, LATEST)]
    assert found[1] == found[2]
    assert found[0] == found[1].model_copy(update={"axis": None, "block_axis": None})


@OTHERS
@pytest.mark.parametrize(
    ("example", "changes", "said"),
    [
        (LEGACY, {"version": "0.4.0"}, "version is 0.4.0; known are 0.5.0"),
        (LISTS, {"version": None}, "version is None"),
        (LISTS, {"activation_encodings": {}}, "activation_encodings is {}"),
        (LISTS, {"activation_encodings.0.offset": [1]}, "x: an offset lies outside"),
        (LISTS, {"activation_encodings.0.offset": [-70000]}, "x: an offset lies outside"),
        (LEGACY, {"param_encodings": []}, "param_encodings"),
        (LEGACY, {"activation_encodings.x": []}, "x: its encodings are"),
        (LEGACY, {"activation_encodings.x.0.scale": 0}, "x: a scale is not greater than 0"),
        (LEGACY, {"activation_encodings.x.0.offset": 3}, "x: its min is not"),
        (LEGACY, {"activation_encodings.x.0.max": 9.0}, "x: its max is not"),
        (LEGACY, {"activation_encodings.x.0.dtype": "complex"}, "x: dtype is COMPLEX"),
        (LEGACY, {"activation_encodings.x.0.is_symmetric": "no"}, "x: is_symmetric is no"),
        (LEGACY, {"param_encodings.w.1.bitwidth": 8}, "w: its channels differ in bitwidth"),
        (LISTS, {"param_encodings.0.block_size": 0}, "w: block_size"),
        (LISTS, {"param_encodings.0.block_size": None}, "w: block_size"),
        (LISTS, {"param_encodings.0.per_block_int_scale": [1] * 5}, "w: 5 blocks for 3 channels"),
        (LISTS, {"param_encodings.0.per_block_int_scale": [0] * 6}, "w: per_block_int_scale"),
        (LISTS, {"param_encodings.0.per_block_int_scale": [300] * 6}, "w: per_block_int_scale"),
        (LISTS, {"param_encodings.0.compressed_bw": 8}, "w: 8 bits compressed from 8"),
        (LISTS, {"param_encodings.0.enc_type": "VECTOR"}, "w: enc_type is VECTOR"),
        (LISTS, {"param_encodings.1.offset": [-8] * 3}, "v: 4 scales for 3 offsets"),
        (LISTS, {"param_encodings.1.offset": [-8.5] * 4}, "v: offset holds a fraction"),
        (LISTS, {"param_encodings.1.name": "w"}, "w has 2 encodings"),
        (LISTS, {"param_encodings.1.name": "x"}, "x has 2 encodings"),
        (LISTS, {"param_encodings.1.scale": "0.1"}, "v: scale is 0.1"),
        (LISTS, {"activation_encodings.0.bw": 33}, "x: bw"),
        (ONNX_LIKE, {"encodings.0.output_dtype": "float8e4m3fn"}, "x: output_dtype"),
        (ONNX_LIKE, {"encodings.0.y_zero_point": 256}, "x: an offset lies outside"),
        (ONNX_LIKE, {"encodings.0.y_zero_point": [1, 2]}, "x: y_zero_point of shape"),
        (ONNX_LIKE, {"encodings.2.axis": None}, "c: PER_TENSOR with 3 scales"),
        (ONNX_LIKE, {"encodings.3.axis": None}, "b: blocks along axis None"),
        (ONNX_LIKE, {"encodings.4.per_channel_float_scale": [[0.1]]}, "w: 1 channel scales"),
        (ONNX_LIKE, {"encodings.4.y_zero_point": 1}, "w: LPBQ with zero points"),
        (LATEST, {"encodings.0.y_scale.x": [[[1, 2]], [[3]]]}, "w: x is no array"),
    ],
)
def test_a_contradiction_names_file_and_tensor(
    tmp_path: Path, example: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    data = copy.deepcopy(example)
    for path, value in changes.items():
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
        place: Any = data
        for key in parents:
            place = place[key]
        place[last] = value
    with pytest.raises(EncodingsError) as caught:
        load(tmp_path, data)
    assert said in str(caught.value)
    assert "model.encodings" in str(caught.value)
    assert "\n" not in str(caught.value)


@OTHERS
def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path, lists, legacy = tmp_path / "e", json.dumps(LISTS), json.dumps(LEGACY)
    cell = json.dumps(LEGACY["activation_encodings"]["x"])
    for text, said in (
        *((lists.replace("0.5", number), ".") for number in ("NaN", "Infinity", "1e999")),
        (legacy.replace('"y": [', f'"x": {cell}, "y": ['), "x has 2 encodings"),
        ("\x80{", "not valid JSON"),
    ):
        path.write_text(text, "latin-1")
        with pytest.raises(EncodingsError, match=said):
            load_encodings(path)
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(EncodingsError, match="larger than any"):
        load_encodings(path)
    with pytest.raises(EncodingsError, match="No such file"):
        load_encodings(tmp_path / "none")


SCALES = st.floats(1e-9, 1e6, allow_nan=False)


@st.composite
def encodings(draw: st.DrawFn) -> Encodings:
    found = []
    for number in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(get_args(EncType)))
        bits = draw(st.sampled_from([4, 8, 16]))
        half = 1 << (bits - 1)
        n_channels = 1 if kind == "PER_TENSOR" else draw(st.integers(2, 4))
        count = n_channels * draw(st.integers(1, 3)) if kind == "PER_BLOCK" else n_channels
        is_sym = draw(st.booleans()) or kind == "LPBQ"
        offsets = st.just(-half) | st.integers(1 - 2 * half, -1)
        offset = (-half if is_sym else draw(offsets),) * count
        fields: dict[str, Any] = {"axis": 0} if kind != "PER_TENSOR" else {}
        if kind in {"PER_BLOCK", "LPBQ"}:
            fields |= {"block_size": draw(st.sampled_from([16, 64])), "block_axis": 1}
        if kind == "PER_BLOCK":
            fields["channels"] = n_channels
        if kind == "LPBQ":
            factors = draw(st.lists(st.integers(1, 255), min_size=1, max_size=3)) * n_channels
            fields |= {"compressed_bw": bits, "per_block_int_scale": bytes(factors)}
            bits, offset = 2 * bits, (-(1 << (2 * bits - 1)),) * count
        found.append(
            Encoding(
                name=f"{draw(st.text(min_size=1, max_size=4))}{number}", dtype="INT",
                enc_type=kind, bw=bits, is_sym=is_sym, offset=offset, **fields,
                scale=tuple(draw(st.lists(SCALES, min_size=count, max_size=count))),
            )
        )  # fmt: skip
    activations = tuple(e for e in found if e.enc_type == "PER_TENSOR")
    params = tuple(e for e in found if e.enc_type != "PER_TENSOR")
    return Encodings(activation_encodings=activations, param_encodings=params)


@given(given_encodings=encodings())
def test_nothing_is_lost_in_a_file(tmp_path: Path, given_encodings: Encodings) -> None:
    first = save_encodings(given_encodings, tmp_path / "1")
    again = load_encodings(first)
    assert again == given_encodings == pickle.loads(pickle.dumps(given_encodings))  # noqa: S301
    assert hash(given_encodings.param_encodings) == hash(again.param_encodings)
    assert save_encodings(again, tmp_path / "2").read_bytes() == first.read_bytes()


@given(seed=st.integers(0, 1 << 32), example=st.sampled_from(EXAMPLES))
def test_a_mutated_file_loads_or_is_refused_in_one_line(
    tmp_path: Path, seed: int, example: dict[str, Any]
) -> None:
    rng, path = np.random.default_rng(seed), tmp_path / "e"
    for _ in range(8):
        data = copy.deepcopy(example)
        for _ in range(rng.integers(1, 4)):
            change_json(rng, data)
        path.write_text(json.dumps(data))
        loaded = loaded_or_refused(path)
        if isinstance(loaded, Encodings):
            assert load_encodings(save_encodings(loaded, tmp_path / "again")) == loaded
        else:
            assert len(loaded.splitlines()) == 1
            assert len(loaded) < 1000


def loaded_or_refused(path: Path) -> Encodings | str:
    try:
        return load_encodings(path)
    except EncodingsError as error:
        return str(error)


@OTHERS
def test_rows_of_channels_and_blocks(tmp_path: Path) -> None:
    found = load(tmp_path, ONNX_LIKE).by_name() | {"v": load(tmp_path, LISTS).by_name()["v"]}
    assert found["x"].rows(0, 5) is found["x"]
    assert found["c"].rows(1, 3).scale == (0.02, 0.03)
    assert found["b"].rows(1, 2).scale == (0.03, 0.04)
    assert found["b"].rows(1, 2).channels == 1
    rows = found["w"].rows(1, 3, 3)
    assert (rows.scale, rows.per_block_int_scale) == ((0.002, 0.003), FACTORS[2:])
    assert rows == Encoding.model_validate(rows.model_dump())
    assert found["v"].rows(1, 2, 2).scale == (0.3, 0.4)
    for name, arguments in (("c", (0, 4)), ("c", (0, 2, 4)), ("v", (0, 1)), ("v", (0, 1, 3))):
        with pytest.raises(EncodingsError, match=name):
            found[name].rows(*arguments)


def test_channels_cost_no_call_each(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    params = tuple(
        Encoding(
            name=f"w{number}", dtype="INT", enc_type="PER_CHANNEL", bw=8, is_sym=True,
            scale=tuple(rng.uniform(1e-4, 1e-2, 4096).tolist()), offset=(-128,) * 4096,
        )
        for number in range(12)
    )  # fmt: skip
    whole = Encodings(param_encodings=params)
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        loaded = load_encodings(save_encodings(whole, tmp_path / "whole"))
    finally:
        sys.setprofile(None)
    assert calls < 12 * 4096 / 4
    assert loaded == whole
