"""Compiled graphs on the HTP emulator agree with quantized ONNX on the CPU."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from buildlib.checkpoint.config import load_config
from buildlib.encodings.files import load_encodings
from buildlib.errors import RunnerDiedError
from buildlib.graph.shape import GraphShape
from buildlib.numerics.child import BrokenFrameError, read_frame, write_frame
from buildlib.numerics.emulator import emulator_chains
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
