"""A safetensors header is checked before anything is read through it."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.checkpoint.tensor_file import read_header
from buildlib.errors import ModelFileError


def write(path: Path, header: object, data: bytes = b"", claim: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if claim is None else claim) + text + data)
    return path


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_tensor_is_read_where_it_lies(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float16).reshape(2, 3)
    header = {"__metadata__": {"format": "pt"}, "a": entry("F16", [2, 3], [0, 12])}
    path = write(tmp_path / "m.safetensors", header, values.tobytes())
    ref = read_header(path)["a"]
    np.testing.assert_array_equal(ref.numpy(), values)
    assert path.read_bytes()[ref.offset : ref.offset + ref.n_bytes] == values.tobytes()
    assert not ref.numpy().flags.writeable


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"a": entry()}, b"1234", "truncated"),
        ({"a": entry(shape=[3])}, b"12345678", "needs 12"),
        ({"a": entry("F64", [1])}, b"12345678", "type F64"),
        ({"a": entry(shape=[-2])}, b"12345678", "list of sizes"),
        ({"a": entry(shape=[True, 2])}, b"12345678", "list of sizes"),
        ({"a": entry(offsets=[8, 0])}, b"12345678", "needs 8"),
        ({"a": entry(offsets=[0, 2**62])}, b"12345678", "data_offsets"),
        ({"a": entry(shape=[2**40, 2**40])}, b"12345678", "needs"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12), "overlap"),
        (b'{"a": {}, "a": {}}', b"", "twice"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b"[]", b"", "no JSON object"),
        (b"\xff\xfe", b"", "not valid JSON"),
    ],
)
def test_a_bad_header_is_one_line(tmp_path: Path, header: object, data: bytes, said: str) -> None:
    path = write(tmp_path / "m.safetensors", header, data)
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_header_longer_than_the_file_is_not_allocated(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="claims"):
        read_header(write(tmp_path / "m.safetensors", {}, claim=2**63))


ODD = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(["F16", "F32"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner)
    ),
    max_leaves=8,
)
HEADERS = st.binary(max_size=200) | st.dictionaries(st.text(max_size=5), ODD, max_size=3)


@given(header=HEADERS, framed=st.booleans())
def test_odd_headers_never_give_a_tensor_outside_the_file(
    tmp_path: Path, header: bytes | dict[str, Any], *, framed: bool
) -> None:
    path = write(tmp_path / "odd.safetensors", header, bytes(64))
    if not framed:  # without the size of the header
        path.write_bytes(path.read_bytes()[8:])
    try:
        refs = read_header(path)
    except ModelFileError:
        return
    for ref in refs.values():
        assert ref.offset + ref.n_bytes <= path.stat().st_size
