"""Compiled graphs on the HTP emulator agree with quantized ONNX on the CPU."""

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper as oh
import pytest

from buildlib.builder.build import BuildOutputs
from buildlib.encodings.grid import activation_grid
from buildlib.encodings.model import Encodings, asymmetric_encoding
from buildlib.errors import RunnerDiedError
from buildlib.numerics.child import BrokenFrameError, read_frame, write_frame
from buildlib.numerics.divergence import sqnr_db
from buildlib.numerics.emulator import EmulatedPart, EmulatorProcess, emulator_chains
from buildlib.numerics.runners import read_ports
from buildlib.quantize.qdq import apply_encodings
from buildlib.targets import parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain


def test_compiled_graphs_have_the_ports_of_the_quantized_ones_and_die_alone(
    reference_outputs: BuildOutputs,
) -> None:
    """What they compute is held against those in `test_verifier.py`."""
    chains = emulator_chains(reference_outputs.binaries, OrtQnnToolchain(), soc_model=69)
    quantized = {shape.ar: paths for shape, paths in reference_outputs.qdq_parts.items()}
    assert {ar: [part.ports for part in chain] for ar, chain in chains.items()} == {
        ar: [read_ports(path) for path in paths] for ar, paths in quantized.items()
    }
    part = chains[1][0]
    with pytest.raises(RunnerDiedError, match="missing"):
        part.run({"input_ids": np.zeros((1, 1), np.int32)})
    process = part._process._child
    assert len(os.sched_getaffinity(process.pid)) == 1  # its idle threads wait busily
    process.kill()
    with pytest.raises(RunnerDiedError, match="exit status -9"):
        part.run({"input_ids": np.zeros((1, 1), np.int32)})


@pytest.mark.needs("libatomic1")
def test_a_product_has_all_bits_of_both_operands(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    data, other = rng.normal(size=(1, 1, 32, 64)), rng.normal(size=(1, 1, 64, 128))
    data[..., 0] /= 60
    other[:, :, 0] *= 60  # a large channel, as keys have
    values = {"a": data, "b": other, "y": data @ other}
    ports = [
        oh.make_tensor_value_info(name, onnx.TensorProto.FLOAT, one.shape)
        for name, one in values.items()
    ]
    graph = oh.make_graph([oh.make_node("MatMul", ["a", "b"], ["y"])], "g", ports[:2], ports[2:])
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "float.onnx")
    encodings = {
        name: asymmetric_encoding(name, one.min(), one.max(), 16) for name, one in values.items()
    }
    whole = Encodings(activation_encodings=tuple(encodings.values()))
    toolchain, target = OrtQnnToolchain(), parse_target("SM8750:emulator")
    qdq = apply_encodings(tmp_path / "float.onnx", whole, tmp_path / "qdq.onnx")
    toolchain.convert(qdq, tmp_path / "y.dlc", target)
    info = toolchain.compile(
        [tmp_path / "y.dlc"], tmp_path / "y.bin", CompileConfig.for_target(target)
    )
    process = EmulatorProcess(
        [(tmp_path / "y.bin", info.graphs[0].name)], target.soc.soc_model, 120.0
    )
    part, grids = (
        EmulatedPart(process, 0, info.graphs[0]),
        {n: activation_grid(e) for n, e in encodings.items()},
    )
    with contextlib.closing(part):
        found = part.run({name: grids[name].quantize(values[name]) for name in "ab"})
    assert (
        sqnr_db(values["y"].astype(np.float32), grids["y"].dequantize(found["y"])) > 40
    )  # 9 with 8 bits of `b`


def test_frames_survive_the_pipe_and_junk_is_refused() -> None:
    reader, writer = os.pipe()
    arrays: dict[str, npt.NDArray[Any]] = {
        "a": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "b": np.zeros((0, 4), np.float32),
    }
    write_frame(writer, {"run": 3}, arrays)
    header, found = read_frame(reader, 5)
    assert header["run"] == 3
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    with pytest.raises(BrokenFrameError, match="in time"):
        read_frame(reader, 0.05)
    os.write(writer, b"\x02\x00\x00\x00[]")
    with pytest.raises(BrokenFrameError, match="unreadable"):
        read_frame(reader, 5)
    os.write(writer, b"\xff\xff\xff\xff")
    with pytest.raises(BrokenFrameError, match="header of"):
        read_frame(reader, 5)
    os.close(writer)
    with pytest.raises(BrokenFrameError, match="closed"):
        read_frame(reader, 5)
    os.close(reader)
