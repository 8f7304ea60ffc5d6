"""Logs of refused models name the unsupported operators."""

from pathlib import Path

import pytest

from buildlib.errors import ToolchainError
from buildlib.toolchains.base import compile_memory_bytes
from buildlib.toolchains.ort_qnn.toolchain import diagnose

LINE = "[E:onnxruntime:, qnn_execution_provider.cc:2453] Unsupported nodes in QNN EP: "


def error(log: Path) -> ToolchainError:
    return ToolchainError("convert", "ar1_cl64_2_of_3.onnx", "FAIL", 1, ("last",), str(log))


def test_every_node_counts_once_and_kinds_are_few(tmp_path: Path) -> None:
    nodes = [(f"node {i}", f"Op{i % 8}") for i in range(12)]
    found = "".join(f"{{ name: {name}, type: {kind} }}" for name, kind in nodes)
    log = tmp_path / "a.log"
    log.write_text(f"{LINE}{found}\nnoise\n{LINE}{found}\n")
    named = diagnose(error(log))
    said = str(named)
    assert "12 operators are not supported: Op0 (2, first node 0), " in said
    assert "3 more kinds" in said
    assert said.startswith("convert of ar1_cl64_2_of_3.onnx failed")


@pytest.mark.parametrize("content", [None, b"", b"\xff\x00 nothing of the kind"])
def test_another_failure_stays_what_it_is(content: bytes | None, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    if content is not None:
        log.write_bytes(content)
    before = error(log)
    assert diagnose(before) is before


def test_estimates_grow_with_what_is_compiled_and_come_near_what_was_measured() -> None:
    """Embedding, one layer and head of Llama-3.2-1B: 849 MB, 6.9 GB at the peak."""
    one = compile_memory_bytes(1 << 30, 1, weight_sharing=True)
    both = compile_memory_bytes(1 << 30, 2, weight_sharing=True)
    assert one < both < compile_memory_bytes(1 << 30, 2, weight_sharing=False)
    estimate = compile_memory_bytes(849 << 20, 2, weight_sharing=True)
    assert 6.9 < estimate / (1 << 30) < 8.5
