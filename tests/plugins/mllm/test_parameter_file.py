"""Files `.mllm`, against mllm's own writer and damage of all kinds."""

import hashlib
import re
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from buildlib.errors import InputFileError, ModelFileError
from plugins.mllm.parameter_file import ParameterFile, read_parameters, write_parameters
from plugins.mllm.tensors import Tensor, read_safetensors, write_safetensors

_Q = "model.layers.0.self_attn.q_proj"
# SHA-256 of the file that `ModelFileV2` of mllm b9c3070 writes for `_arrays`, static or streaming.
_MLLMS_OWN = "39be9c11bd484f55a3552a3d510a5a107a60452ecc376448b1275e2325e07921"


def _arrays() -> dict[str, npt.NDArray[np.generic]]:
    numbers = np.random.Generator(np.random.PCG64(1))
    return {
        f"{_Q}.weight": numbers.integers(0, 16, (1, 1, 64, 128), dtype=np.int8),
        f"{_Q}.scale1": numbers.integers(1, 17, 64 // 16 * 128, dtype=np.uint8),
        f"{_Q}.scale2": numbers.random(128, dtype=np.float32),
        "model.norm.weight": numbers.integers(0, 65536, 64, dtype=np.uint16),
        "model.norm.zero_point": np.array([3], np.int32),
        "half": numbers.random(3).astype(np.float16),
        "wide": np.arange(4),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(2.5, np.float32),
        "größe": np.ones(1, np.float32),
    }


def _write(path: Path, name: str = "") -> Path:
    tensors = [Tensor.of(name, array) for name, array in _arrays().items()]
    write_parameters(path, tensors, name)
    return path


def _loaded(file: ParameterFile) -> dict[str, npt.NDArray[np.generic]]:
    return {name: tensor.load() for name, tensor in file.tensors.items()}


def test_a_file_is_that_of_mllms_own_writer(tmp_path: Path) -> None:
    written = hashlib.sha256(_write(tmp_path / "ours.mllm").read_bytes()).hexdigest()
    assert written == _MLLMS_OWN


def test_what_is_read_writes_the_same_bytes(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.mllm", "tiny")
    file = read_parameters(path)
    write_parameters(tmp_path / "b.mllm", list(file.tensors.values()), file.model_name)
    assert (tmp_path / "b.mllm").read_bytes() == path.read_bytes()
    assert (file.version, file.model_name) == (2, "tiny")
    for name, array in _arrays().items():
        np.testing.assert_array_equal(file.tensors[name].load(), array, strict=True)


def test_version_1_is_read(tmp_path: Path) -> None:
    weight, other = np.arange(6, dtype=np.float32), b"\x01\x02\x03"
    names = {b"model.weight": (weight.tobytes(), 0), b"packed": (other, 2)}
    size = sum(4 + len(name) + 20 for name in names)
    table, data = b"", b""
    for name, (raw, kind) in names.items():
        place = 12 + size + len(data)
        table += struct.pack("<I", len(name)) + name + struct.pack("<QQi", len(raw), place, kind)
        data += raw
    path = tmp_path / "one.mllm"
    path.write_bytes(struct.pack("<iQ", 20012, size) + table + data)
    file = read_parameters(path)
    assert (file.version, [t.dtype for t in file.tensors.values()]) == (1, ["float32", "q4_0"])
    np.testing.assert_array_equal(file.tensors["model.weight"].load(), weight)
    assert file.tensors["packed"].load().tobytes() == other
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputFileError, match="line 1 of its table, 'packed'"):
        read_parameters(path)


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (4, struct.pack("<I", 77), "no type 77"),
        (8, struct.pack("<Q", 5), "5 bytes for uint8"),
        (16, struct.pack("<Q", 1 << 60), "after the end of the file"),
        (96, b"\0", "no name"),
        (96, f"{_Q}.weight\0".encode(), "has its name"),
        (16, struct.pack("<Q", 532 + 352 * 10), f"overlaps '{_Q}.weight'"),
    ],
)
def test_damage_is_told_by_its_line(tmp_path: Path, offset: int, value: bytes, reason: str) -> None:
    path = _write(tmp_path / "a.mllm")
    data = bytearray(path.read_bytes())
    start = 532 + 352 + offset
    data[start : start + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(InputFileError, match=f"line 1 of its table.*{re.escape(reason)}"):
        read_parameters(path)


@given(place=st.integers(0, 532 + 352 * 10 - 1), value=st.binary(min_size=1, max_size=16))
def test_a_changed_header_or_table_is_refused_or_reads_within_the_file(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: bytes
) -> None:
    path = _write(tmp_path_factory.mktemp("changed") / "a.mllm")
    data = bytearray(path.read_bytes())
    data[place : place + len(value)] = value
    path.write_bytes(data)
    try:
        file = read_parameters(path)
    except InputFileError:
        return
    assert all(array.nbytes == file.tensors[name].n_bytes for name, array in _loaded(file).items())


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"GGUF" + bytes(1000))
    for path in (tmp_path / "other", tmp_path / "missing", tmp_path):
        with pytest.raises(InputFileError):
            read_parameters(path)


def test_safetensors_are_those_of_its_library(tmp_path: Path) -> None:
    save_file(_arrays(), tmp_path / "theirs.safetensors")
    tensors = read_safetensors(tmp_path / "theirs.safetensors")
    write_safetensors(tmp_path / "ours.safetensors", tensors.values())
    ours, theirs = (tmp_path / f"{name}.safetensors" for name in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert list(tensors) == sorted(_arrays())
    np.testing.assert_array_equal(load_file(ours)["wide"], np.arange(4))


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(_arrays(), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFileError):
        read_safetensors(path)
