"""DLCs of the real converter, read without a compiler; and what is none."""

import zipfile
from pathlib import Path

import pytest

from buildlib.builder.build import BuildOutputs
from buildlib.container.dlc import inspect_dlc, is_dlc
from buildlib.errors import InputFileError


@pytest.fixture(scope="module")
def dlc(reference_outputs: BuildOutputs) -> Path:
    """The second part of the reference model at AR 32."""
    folders = [part.parent for parts in reference_outputs.qdq_parts.values() for part in parts]
    return next(path for folder in folders for path in folder.glob("ar32_*_2_of_2.dlc"))


def test_graph_operators_and_weights(dlc: Path) -> None:
    info = inspect_dlc(dlc)
    (graph,) = info.graphs
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    assert inputs["past_key_2_in"].shape == (2, 1, 24, 160)
    assert inputs["past_key_2_in"].dtype == "uint8"
    encoding = inputs["past_key_2_in"].encoding
    assert encoding is not None
    assert encoding.offset == -128
    assert [tensor.name for tensor in graph.outputs][-1] == "logits"
    assert graph.operators["RmsNorm"] == 5  # two layers of two, and the last
    assert graph.operators["Softmax"] >= 2
    assert graph.weight_elements["int8"] > 600_000
    assert info.size_bytes == dlc.stat().st_size
    assert "model.params.bin" in info.members


def test_what_is_no_dlc(dlc: Path, tmp_path: Path) -> None:
    whole = dlc.read_bytes()
    noise, cut, spoiled = tmp_path / "noise", tmp_path / "cut.dlc", tmp_path / "spoiled.dlc"
    noise.write_bytes(b"no archive")
    cut.write_bytes(whole[: len(whole) // 2])
    with zipfile.ZipFile(spoiled, "w") as archive:
        archive.writestr("model", b"\xff" * 1000)
    assert [is_dlc(path) for path in (dlc, noise, cut, spoiled)] == [True, False, False, True]
    for bad in (noise, cut, spoiled, tmp_path / "absent", tmp_path):
        with pytest.raises(InputFileError) as caught:
            inspect_dlc(bad)
        assert "\n" not in str(caught.value)
