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

from buildlib.checkpoint.config import load_config
from buildlib.encodings.files import load_encodings
from buildlib.encodings.grid import activation_grid
from buildlib.encodings.model import Encodings, asymmetric_encoding
from buildlib.errors import RunnerDiedError
from buildlib.graph.shape import GraphShape
from buildlib.numerics.child import BrokenFrameError, read_frame, write_frame
from buildlib.numerics.divergence import sqnr_db
from buildlib.numerics.emulator import EmulatedPart, EmulatorProcess, emulator_chains
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner
from buildlib.passes.arcl import convert_arcl
from buildlib.passes.split import split_model
from buildlib.quantize.qdq import apply_encodings
from buildlib.targets import parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain


@pytest.mark.needs("libatomic1")
def test_compiled_graphs_are_the_quantized_ones(tiny_export: Path, tmp_path: Path) -> None:
    encodings = load_encodings(tiny_export / "model.encodings")
    config = load_config(tiny_export / "config.json")
    toolchain, target = OrtQnnToolchain(), parse_target("SM8750:emulator")
    model = convert_arcl(tiny_export / "model.onnx", GraphShape(1, 96), tmp_path / "ar1.onnx")
    on_cpu, binaries = [], []
    for part in split_model(model, 2, tmp_path):
        qdq = apply_encodings(part, encodings, tmp_path / f"{part.stem}.qdq.onnx")
        on_cpu.append(OnnxRunner(qdq, n_threads=1))
        dlc, binary = tmp_path / f"{part.stem}.dlc", tmp_path / f"{part.stem}.bin"
        toolchain.convert(qdq, dlc, target)
        toolchain.compile([dlc], binary, CompileConfig.for_target(target))
        binaries.append(binary)
    chains = emulator_chains(binaries, toolchain, soc_model=target.soc.soc_model)
    assert [part.ports for part in chains[1]] == [runner.ports for runner in on_cpu]
    tokens = np.random.default_rng(4).integers(0, 300, 12).tolist()
    with HostLoop({1: on_cpu}, config) as cpu, HostLoop(chains, config) as emulated:
        expected, found = cpu.feed(tokens), emulated.feed(tokens)
        step = np.ptp(expected) / 65535
        assert np.abs(found - expected).max() < 400 * step
        assert np.abs(found - expected).mean() < 60 * step
        wrong = {"input_ids": np.zeros((1, 1), np.int32)}
        with pytest.raises(RunnerDiedError, match="missing"):
            chains[1][0].run(wrong)
        process = chains[1][0]._process._child
        assert len(os.sched_getaffinity(process.pid)) == 1  # its idle threads wait busily
        process.kill()
        with pytest.raises(RunnerDiedError, match="exit status -9"):
            emulated.feed([1])


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
