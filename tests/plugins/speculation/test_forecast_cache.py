"""Forecast tokens: trained tensors read, rows in the table, the prefix as Genie's cache file."""

import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.embedding.table import write_table
from buildlib.encodings.files import load_encodings
from buildlib.encodings.model import Encodings
from buildlib.errors import EncodingsError, InputFileError, ModelFileError
from buildlib.graph import interface
from buildlib.graph.files import load_model
from buildlib.graph.shape import GraphShape
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.passes.arcl import convert_arcl
from plugins.speculation.forecast_cache import add_forecast_rows, write_prefix
from plugins.speculation.ssd_tensors import SsdTensors, read_torch_file

TORCH_FILE = Path(__file__).parents[2] / "fixtures" / "ssd" / "ssd_tensor.pt"
"""Made by torch 2.13: float32, float16, and a view with other strides, for the tiny checkpoint."""


@pytest.fixture(scope="module")
def config(tiny_export: Path) -> DecoderConfig:
    return load_config(tiny_export / "config.json")


def loaded(path: Path, config: DecoderConfig) -> SsdTensors:
    return SsdTensors.load(path, config, forecast_tokens=3, prefix_length=4)


def test_a_file_of_torch_and_one_of_safetensors_say_the_same(
    config: DecoderConfig, tmp_path: Path
) -> None:
    tensors = read_torch_file(TORCH_FILE)
    save_file(tensors, tmp_path / "same.safetensors")
    one, other = loaded(TORCH_FILE, config), loaded(tmp_path / "same.safetensors", config)
    assert one.embedding.shape == (3, config.hidden_size)
    assert one.keys[0].shape == one.values[0].shape
    for mine, its in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        assert np.array_equal(mine, its)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    bad = tmp_path / "bad.pt"
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("bad/data.pkl", pickle.dumps({"x": Runs()}))
    with pytest.raises(InputFileError, match="it names pathlib"):
        read_torch_file(bad)
    assert not (tmp_path / "ran").exists()


def test_damaged_files(config: DecoderConfig, tmp_path: Path) -> None:
    data = TORCH_FILE.read_bytes()
    for end in range(0, len(data), 397):
        (tmp_path / "cut.pt").write_bytes(data[:end])
        with pytest.raises(InputFileError):
            read_torch_file(tmp_path / "cut.pt")
    tensors = read_torch_file(TORCH_FILE)
    for name, array, message in (
        ("forecast_embedding", tensors["forecast_embedding"][:2], "2 forecast tokens; 3 are asked"),
        ("prefix_key_0", tensors["prefix_key_0"][:, 1:], r"prefix_key_0 is \[2, 3, 12\], the mo"),
        ("prefix_value_1", tensors["prefix_value_1"] * np.float32(np.inf), "all finite"),
    ):
        save_file({**tensors, name: np.ascontiguousarray(array)}, tmp_path / "odd.safetensors")
        with pytest.raises(InputFileError, match=message):
            loaded(tmp_path / "odd.safetensors", config)
    del tensors["prefix_value_1"]
    save_file(tensors, tmp_path / "less.safetensors")
    with pytest.raises(InputFileError, match="no prefix_value_1"):
        loaded(tmp_path / "less.safetensors", config)


def test_more_rows_change_no_token(
    tiny_export: Path, config: DecoderConfig, tmp_path: Path
) -> None:
    rows = loaded(TORCH_FILE, config).embedding
    source = tiny_export / "model.onnx"
    longer = add_forecast_rows(source, tmp_path / "model.onnx", rows)
    table = write_table(longer, tmp_path / "table.raw", "float32")
    forecast = table.rows(np.arange(config.vocab_size, config.vocab_size + len(rows)))
    assert np.array_equal(forecast, rows)
    logits = []
    for index, path in enumerate((source, longer)):
        decode = convert_arcl(path, GraphShape(1, 96), tmp_path / str(index) / "model.onnx")
        with HostLoop({1: [OnnxRunner(decode)]}, config) as loop:
            logits.append(loop.feed([5, 9, 17]))
    assert np.array_equal(logits[0], logits[1])
    with pytest.raises(ModelFileError, match="forecast rows have 39"):
        add_forecast_rows(source, tmp_path / "odd.onnx", rows[:, 1:])
    names = [value.name for value in load_model(longer).graph.inputs]
    assert names[0] == interface.INPUT_IDS


@pytest.mark.parametrize("bits", [8, 16])
def test_the_prefix_lies_on_the_grids_of_the_caches(
    tiny_export: Path, config: DecoderConfig, tmp_path: Path, bits: int
) -> None:
    tensors = loaded(TORCH_FILE, config)
    encodings = load_encodings(tiny_export / "model.encodings")
    half = 1 << (bits - 1)
    wider = tuple(
        e.model_copy(
            update={"bw": bits, "offset": (-half,), "scale": (e.scale[0] * 127 / (half - 1),)}
        )
        if interface.is_kv(e.name)
        else e
        for e in encodings.activation_encodings
    )
    encodings = encodings.model_copy(update={"activation_encodings": wider})
    sizes = np.random.default_rng(2).uniform(0.5, 1.5, (2, 2, 12)).astype(np.float32)
    factors = {
        interface.past_key(1, "out"): sizes[0][:, None, :, None],
        interface.past_value(1, "out"): sizes[1][:, None, None, :],
    }
    write_prefix(tensors, encodings, tmp_path / "cache", factors)
    data = (tmp_path / "cache").read_bytes()
    layers, heads, dim, tokens = config.num_hidden_layers, 2, 12, 4
    assert struct.unpack_from("<IIHHHH", data) == (2 * layers, 0xC0DE, 0, heads, dim, tokens)
    scales = struct.unpack(f"<{2 * layers}d", data[-16 * layers :])
    kind, middle = ("uint8", half) if bits == 8 else ("int16", 0)
    body = np.frombuffer(data, kind, offset=16, count=2 * layers * heads * dim * tokens)
    caches = body.reshape(2 * layers, -1).astype(np.float32) - middle
    key = caches[1].reshape(heads, dim, tokens) * scales[1]
    value = caches[layers + 1].reshape(heads, tokens, dim) * scales[layers + 1]
    for found, given, scale in (
        (key, tensors.keys[1].transpose(0, 2, 1) * sizes[0][:, :, None], scales[1]),
        (value, tensors.values[1] * sizes[1][:, None, :], scales[layers + 1]),
    ):
        inside = np.abs(given) < (half - 1) * scale
        assert np.abs(found - given)[inside].max(initial=0.0) <= scale / 2 + 1e-6
        assert np.all(np.sign(found)[~inside] == np.sign(given)[~inside])
    with pytest.raises(EncodingsError, match="integers around"):
        write_prefix(tensors, Encodings(), tmp_path / "none")
