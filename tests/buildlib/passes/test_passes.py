"""Passes keep what a model computes, and copy no weights."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from buildlib.checkpoint.config import DecoderConfig, load_config
from buildlib.encodings.files import load_encodings
from buildlib.errors import InvalidOptionError, ModelFileError
from buildlib.graph.shape import GraphShape
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner, read_ports
from buildlib.passes.arcl import convert_arcl
from buildlib.passes.split import split_model
from buildlib.quantize.qdq import apply_encodings

SHAPE = GraphShape(16, 96)


@pytest.fixture(scope="module")
def config(tiny: Path) -> DecoderConfig:
    return load_config(tiny / "config.json")


def logits(
    paths: list[Path], config: DecoderConfig
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    runners = [OnnxRunner(path, n_threads=1) for path in paths]
    shape = runners[0].ports.inputs["attention_mask"].shape
    with HostLoop({shape[2]: runners}, config) as loop:
        return loop.feed([0, *range(20, 60)])


def test_arcl_round_trip_is_the_same_model(
    tiny_export: Path, tmp_path: Path, config: DecoderConfig
) -> None:
    model = tiny_export / "model.onnx"
    other = convert_arcl(model, GraphShape(24, 120), tmp_path / "other.onnx")
    back = convert_arcl(other, SHAPE, tmp_path / "back.onnx")
    np.testing.assert_array_equal(logits([back], config), logits([model], config))
    ports = read_ports(other)
    assert ports.inputs["past_key_1_in"].shape == (2, 1, 12, 96)
    assert ports.inputs["past_value_1_in"].shape == (2, 1, 96, 12)
    assert ports.outputs["past_key_1_out"].shape == (2, 1, 12, 24)
    assert ports.outputs["logits"].shape == (1, 24, 300)
    assert (tmp_path / "model.safetensors").samefile(tiny_export / "model.safetensors")


@pytest.mark.parametrize("quantized", [False, True])
def test_parts_in_a_row_are_the_model_bit_by_bit(
    tiny_export: Path, tmp_path: Path, config: DecoderConfig, *, quantized: bool
) -> None:
    model = tiny_export / "model.onnx"
    if quantized:
        encodings = load_encodings(tiny_export / "model.encodings")
        model = apply_encodings(model, encodings, tmp_path / "model.qdq.onnx")
    parts = split_model(model, 2, tmp_path / "parts")
    assert [part.name for part in parts] == ["ar16_cl96_1_of_2.onnx", "ar16_cl96_2_of_2.onnx"]
    first, second = map(read_ports, parts)
    assert set(first.outputs) == {"layer_0_output", "past_key_0_out", "past_value_0_out"}
    assert "input_ids" not in second.inputs
    assert second.inputs["layer_0_output"].dtype == (np.uint16 if quantized else np.float32)
    np.testing.assert_array_equal(logits(parts, config), logits([model], config))


def test_splitting_and_quantizing_commute(
    tiny_export: Path, tmp_path: Path, config: DecoderConfig
) -> None:
    encodings = load_encodings(tiny_export / "model.encodings")
    model = tiny_export / "model.onnx"
    whole = apply_encodings(model, encodings, tmp_path / "whole.onnx")
    parts = [
        apply_encodings(part, encodings, tmp_path / f"{part.stem}.qdq.onnx")
        for part in split_model(model, 2, tmp_path)
    ]
    np.testing.assert_array_equal(logits(parts, config), logits([whole], config))


def test_too_many_parts_are_refused(tiny_export: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="3 parts cannot be made of 2 layers"):
        split_model(tiny_export / "model.onnx", 3, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_part_cannot_be_split(tiny_export: Path, tmp_path: Path) -> None:
    part = split_model(tiny_export / "model.onnx", 2, tmp_path)[1]
    with pytest.raises(ModelFileError, match="input_ids is missing"):
        split_model(part, 1, tmp_path / "again")


def test_baked_in_sizes_are_refused(tiny_export: Path, tmp_path: Path) -> None:
    proto = onnx.load(tiny_export / "model.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        if tensor.name == "shape_1_ar_300":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array([1, 16, 300]), tensor.name))
    (tmp_path / "model.safetensors").hardlink_to(tiny_export / "model.safetensors")
    path = tmp_path / "baked.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(Exception, match=r"AR 8|arcl") as caught:
        convert_arcl(path, GraphShape(8, 96), tmp_path / "out.onnx")
    assert type(caught.value).__module__ == "buildlib.errors"
    assert not (tmp_path / "out.onnx").exists()


def test_model_files_are_not_trusted(tiny_export: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        convert_arcl(tmp_path / "none.onnx", SHAPE, tmp_path / "out.onnx")
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"\x00junk" * 100)
    with pytest.raises(ModelFileError):
        convert_arcl(junk, SHAPE, tmp_path / "out.onnx")
    model = tmp_path / "model.onnx"
    model.write_bytes((tiny_export / "model.onnx").read_bytes())
    with pytest.raises(ModelFileError, match=r"model\.safetensors' is missing"):
        convert_arcl(model, SHAPE, tmp_path / "out.onnx")
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ModelFileError, match="truncated"):
        convert_arcl(model, SHAPE, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
