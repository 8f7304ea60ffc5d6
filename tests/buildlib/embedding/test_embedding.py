"""The table outside the graph: the same numbers, on every grid, in bounded memory."""

import tracemalloc
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from pydantic import ValidationError

from buildlib.embedding import table as table_module
from buildlib.embedding.config import TABLE_FILE, EmbeddingConfig
from buildlib.embedding.extraction import EmbeddingExtraction
from buildlib.embedding.table import write_table
from buildlib.encodings.files import load_encodings
from buildlib.errors import EncodingsError, InvalidOptionError, ModelFileError
from buildlib.graph.files import load_model, save_model
from buildlib.graph.shape import GraphShape
from buildlib.numerics.runners import OnnxRunner
from buildlib.passes.arcl import convert_arcl


def test_outputs_are_bit_exact(tiny_export: Path, tmp_path: Path) -> None:
    source, target = tiny_export / "model.onnx", tmp_path / "model.onnx"
    EmbeddingExtraction().run(source, target)
    table = write_table(source, tmp_path / TABLE_FILE, "float32")
    rng = np.random.default_rng(1)
    whole, rest = OnnxRunner(source), OnnxRunner(target)
    feeds = {
        name: rng.normal(size=port.shape).astype(np.float32)
        for name, port in whole.ports.inputs.items()
    }
    ids = rng.integers(0, 300, (1, 16)).astype(np.int32)
    expected = whole.run(feeds | {"input_ids": ids})
    assert next(iter(rest.ports.inputs)) == "inputs_embeds"
    ours = rest.run(feeds | {"inputs_embeds": table.rows(ids)})
    for name, values in expected.items():
        np.testing.assert_array_equal(ours[name], values)


def test_the_input_takes_the_lookups_encoding_and_follows_ar(
    tiny_export: Path, tmp_path: Path
) -> None:
    EmbeddingExtraction().run(tiny_export / "model.onnx", tmp_path / "model.onnx")
    before = {
        e.name: e for e in load_encodings(tiny_export / "model.encodings").activation_encodings
    }
    after = load_encodings(tmp_path / "model.encodings")
    known = {e.name: e for e in after.activation_encodings}
    assert "embedding" not in known
    assert known["inputs_embeds"].scale == before["embedding"].scale
    decode = convert_arcl(tmp_path / "model.onnx", GraphShape(1, 48), tmp_path / "decode.onnx")
    assert OnnxRunner(decode).ports.inputs["inputs_embeds"].shape == (1, 1, 40)


@pytest.mark.parametrize("datatype", ["uint8", "uint16", "int8", "int16"])
def test_integers_are_half_a_step_off_at_most(
    datatype: str, tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_export / "model.onnx"
    floats = write_table(source, tmp_path / "f.raw", "float32")
    stored = write_table(source, tmp_path / "q.raw", datatype)  # type: ignore[arg-type]
    ids = np.arange(300)
    assert stored.embed_quant_scale is not None
    error = np.abs(stored.rows(ids) - floats.rows(ids)).max()
    assert 0 < error <= stored.embed_quant_scale * 0.501
    whole = (tmp_path / "q.raw").read_bytes()
    monkeypatch.setattr(table_module, "_CHUNK_BYTES", 7 * 40 * 4)
    write_table(source, tmp_path / "q.raw", datatype)  # type: ignore[arg-type]
    assert (tmp_path / "q.raw").read_bytes() == whole


def test_a_16_bit_table_lies_on_the_inputs_grid(tiny_export: Path, tmp_path: Path) -> None:
    stored = write_table(tiny_export / "model.onnx", tmp_path / "q.raw", "uint16")
    encodings = load_encodings(tiny_export / "model.encodings").activation_encodings
    (lookup,) = (e for e in encodings if e.name == "embedding")
    assert (stored.embed_quant_scale, stored.embed_quant_offset) == (
        lookup.scale[0],
        lookup.offset[0],
    )
    block = stored.genie()
    assert (block.datatype, block.size) == ("ufixed16", 40)


def big_model(folder: Path, values: np.ndarray | None, rows: int, width: int) -> Path:
    """A lookup in a table that is a hole in a file, but for `values` at its start."""
    with (folder / "table.bin").open("wb") as file:
        file.truncate(rows * width * 2)
        if values is not None:
            file.write(values.tobytes())
    tensor = ir.ExternalTensor(
        "table.bin", 0, rows * width * 2, ir.DataType.FLOAT16,
        shape=ir.Shape((rows, width)), name="table", base_dir=folder,
    )  # fmt: skip
    table = ir.Value(
        name="table",
        type=ir.TensorType(ir.DataType.FLOAT16),
        shape=ir.Shape((rows, width)),
        const_value=tensor,
    )
    ids = ir.Value(name="input_ids", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape((1, 4)))
    cast = ir.node("Cast", [table], attributes={"to": 1})
    gather = ir.node("Gather", [cast.outputs[0], ids])
    gather.outputs[0].name = "embedding"
    cast.outputs[0].name = "table_f32"
    graph = ir.Graph(
        [ids], [gather.outputs[0]], nodes=[cast, gather], initializers=[table],
        opset_imports={"": 23}, name="g",
    )  # fmt: skip
    return save_model(ir.Model(graph, ir_version=10), folder / "model.onnx")


def test_a_large_table_is_streamed(tmp_path: Path) -> None:
    first = np.array([-2.0, 3.0], np.float16)
    model = big_model(tmp_path, first, 1 << 15, 1024)  # 64 MiB
    tracemalloc.start()
    stored = write_table(model, tmp_path / TABLE_FILE, "uint8")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / TABLE_FILE).stat().st_size == 32 << 20
    assert peak < 24 << 20
    np.testing.assert_allclose(stored.rows(np.array([0]))[0, :3], [-2.0, 3.0, 0.0], atol=0.011)


def test_what_is_not_finite_leaves_nothing(tmp_path: Path) -> None:
    model = big_model(tmp_path, np.array([np.inf], np.float16), 8, 4)
    for datatype in ("uint8", "float32"):
        with pytest.raises(EncodingsError, match="not finite"):
            write_table(model, tmp_path / TABLE_FILE, datatype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "table.bin"]


def test_models_without_a_lookup_are_refused(tiny_export: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    EmbeddingExtraction().run(tiny_export / "model.onnx", target)
    with pytest.raises(ModelFileError, match="there is no input_ids"):
        EmbeddingExtraction().run(target, tmp_path / "twice.onnx")
    with pytest.raises(ModelFileError, match="in no table"):
        write_table(target, tmp_path / "t.raw", "float32")
    model = load_model(tiny_export / "model.onnx")
    ids = next(value for value in model.graph.inputs if value.name == "input_ids")
    twin = ir.node("Identity", [ids])
    twin.outputs[0].name = "ids_out"
    model.graph.append(twin)
    model.graph.outputs.append(twin.outputs[0])
    twin.outputs[0].shape, twin.outputs[0].type = ids.shape, ids.type
    save_model(model, tmp_path / "two.onnx")
    with pytest.raises(ModelFileError, match="goes elsewhere"):
        EmbeddingExtraction().run(tmp_path / "two.onnx", tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_configurations_that_make_no_sense(tmp_path: Path) -> None:
    path = tmp_path / TABLE_FILE
    path.write_bytes(bytes(100))
    good = {"embed_datatype": "uint8", "embed_length": 10, "embed_path": path}
    grid = {"embed_quant_scale": 0.5, "embed_quant_offset": -3}
    for values in (good, good | grid | {"embed_datatype": "float32"}, good | grid | {"x": 1}):
        with pytest.raises(ValidationError):
            EmbeddingConfig.model_validate(values)
    config = EmbeddingConfig.model_validate(good | grid)
    assert config.rows(np.array([[9]])).shape == (1, 1, 10)
    signed = EmbeddingConfig.model_validate(good | grid | {"embed_datatype": "int8"})
    with pytest.raises(InvalidOptionError, match="use uint16"):
        signed.genie()
