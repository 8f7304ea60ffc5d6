"""The committed exports are what their exporters wrote: whole, small, right by their samples."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

EXPORTS = Path(__file__).parents[1] / "fixtures" / "exports"
FOLDERS = sorted(path.parent for path in EXPORTS.glob("*/model.onnx"))


def test_they_take_three_megabytes_at_most() -> None:
    assert sum(path.stat().st_size for path in EXPORTS.rglob("*") if path.is_file()) <= 3 << 20


def test_every_one_is_described() -> None:
    described = re.findall(
        r"^\| `(\w+-[\w-]+)` \|", (EXPORTS / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(described) == [folder.name for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_graph_answers_as_torch_did(folder: Path) -> None:
    sample = np.load(folder / "sample.npz")
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs()]
    logits = []
    for step in range(3):
        answers = session.run(outputs, {name: sample[f"step{step}.in.{name}"] for name in inputs})
        for name, answer in zip(outputs, answers, strict=True):
            expected = sample[f"step{step}.out.{name}"]
            np.testing.assert_allclose(answer, expected, rtol=0, atol=2e-5)
        logits.append(answers[outputs.index("logits")])
    whole = np.concatenate(logits, axis=1)
    np.testing.assert_allclose(whole, sample["logits"], rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "path", sorted(EXPORTS.glob("*/model.encodings")), ids=lambda path: path.parent.name
)
def test_encodings_name_tensors_of_their_model(path: Path) -> None:
    graph = onnx.load(path.with_suffix(".onnx"), load_external_data=False).graph
    values = {name for node in graph.node for name in node.output}
    values |= {value.name for value in graph.input}
    data = json.loads(path.read_text())
    for group, known in (
        ("activation_encodings", values),
        ("param_encodings", {tensor.name for tensor in graph.initializer}),
    ):
        names = {e["name"] for e in data[group]} if isinstance(data[group], list) else data[group]
        assert names
        assert set(names) <= known
