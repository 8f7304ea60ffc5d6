"""Separate heads, quantized and compiled: the emulator agrees with the CPU."""

from pathlib import Path

import numpy as np

from buildlib.checkpoint.config import load_config
from buildlib.encodings.files import load_encodings
from buildlib.graph.shape import GraphShape
from buildlib.passes.arcl import convert_arcl
from buildlib.passes.mha2sha import convert_mha2sha
from buildlib.pipeline.stages.export import export_checkpoint
from buildlib.quantize.qdq import apply_encodings
from buildlib.reference.emulator import emulator_chains
from buildlib.reference.host_loop import HostLoop
from buildlib.reference.runners import OnnxRunner
from buildlib.targets import parse_target
from buildlib.toolchains.base import CompileConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain


def test_the_reference_model_survives_the_compiler(trained: Path, tmp_path: Path) -> None:
    text = (trained / "text" / "calibration.txt").read_text()
    shapes = GraphShape(16, 64), GraphShape(1, 64)
    exported = export_checkpoint(trained, text, tmp_path / "export", shapes[0], n_windows=1)
    config = load_config(exported / "config.json")
    toolchain, target = OrtQnnToolchain(), parse_target("SM8750:emulator")
    quantized: list[Path] = []
    for shape in shapes:
        model = convert_arcl(exported / "model.onnx", shape, tmp_path / f"{shape}" / "model.onnx")
        apart = convert_mha2sha(model, tmp_path / f"{shape}.onnx")
        encodings = load_encodings(apart.with_suffix(".encodings"))
        quantized.append(apply_encodings(apart, encodings, tmp_path / f"{shape}.qdq.onnx"))
        toolchain.convert(quantized[-1], tmp_path / f"{shape}.dlc", target)
    binary = tmp_path / "apart.bin"
    dlcs = [tmp_path / f"{shape}.dlc" for shape in shapes]
    toolchain.compile(dlcs, binary, CompileConfig.for_target(target))
    emulated = emulator_chains([binary], toolchain, soc_model=target.soc.soc_model)
    on_cpu = {s.ar: [OnnxRunner(q)] for s, q in zip(shapes, quantized, strict=True)}
    tokens = np.random.default_rng(4).integers(2, 1000, 20).tolist()
    with HostLoop(on_cpu, config) as cpu, HostLoop(emulated, config) as compiled:
        expected, found = cpu.feed(tokens), compiled.feed(tokens)
    noise = np.square(found - expected, dtype=np.float64).mean()
    assert 10 * np.log10(np.square(expected, dtype=np.float64).mean() / noise) > 40
