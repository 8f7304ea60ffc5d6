"""Headers of GGUF files: read as the package `gguf` writes them, or refused in one line."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.errors import InputFileError
from buildlib.gguf import GgufHeader
from tools.tiny_llama.gguf_file import write_gguf


def test_the_header_of_the_reference_model(tmp_path: Path) -> None:
    header = GgufHeader.read(write_gguf(tmp_path / "tiny.gguf"))
    assert (header.name, header.context_length) == ("tiny_llama", 512)
    assert (header.parameters, header.precision) == (1_098_000, "F32")


@pytest.mark.parametrize("precision", ["Q4_0", "Q8_0", "F16"])
def test_the_precision_is_that_of_most_weights(tmp_path: Path, precision: str) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    weights = np.ones((32, 64), np.float32)
    quantized = gguf.GGMLQuantizationType[precision]
    raw = gguf.quants.quantize(weights, quantized)
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=quantized)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = GgufHeader.read(path)
    place = header.tensors["blk.0.ffn_up.weight"]
    assert (place.shape, place.kind) == ((64, 32), quantized.value)
    assert path.read_bytes()[place.offset :].startswith(raw.tobytes())
    assert (header.precision, header.parameters) == (precision, 32 * 64 + 64)
    assert header.context_length is None


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()[:60_000]


@given(data=st.data())
def test_any_damage_is_refused_or_read(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 2000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    path.write_bytes(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    try:
        GgufHeader.read(path)
    except InputFileError as error:
        assert "\n" not in str(error)  # noqa: PT017
