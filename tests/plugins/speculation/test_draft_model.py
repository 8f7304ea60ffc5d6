"""Draft heads as ONNX, and the hidden states that they read, for families of several kinds."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from buildlib.checkpoint import family_keys
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import load_config
from buildlib.errors import ModelFileError
from buildlib.graph import interface
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import load_model, save_model
from buildlib.graph.shape import GraphShape
from buildlib.numerics.feeds import CallInputs, KvCache
from buildlib.numerics.runners import OnnxRunner
from plugins.speculation.draft_model import (
    FC_EMBEDDING,
    FC_FILE,
    FC_HIDDEN,
    DraftHead,
    export_draft,
    head_config,
    name_hidden_states,
)
from tests.buildlib.families import family_config, write_checkpoint

SHAPE = GraphShape(12, 24)


@pytest.mark.parametrize("name", ["gemma2", "granite", "baichuan", "stablelm"])
def test_hidden_states_are_what_the_output_projection_reads(name: str, tmp_path: Path) -> None:
    """Also where logits are scaled, soft-capped or of rows that are divided by their lengths."""
    folder = write_checkpoint(tmp_path / "model", family_config(name))
    checkpoint = Checkpoint.load(folder)
    model = load_model(export_onnx(checkpoint, SHAPE, tmp_path / "graph"))
    name_hidden_states(model)
    runner = OnnxRunner(save_model(model, tmp_path / "spoken" / "model.onnx"))
    feeds = CallInputs(checkpoint.config, SHAPE.cl).at(SHAPE.ar, 0, range(3, 15))
    feeds |= KvCache(runner.ports.inputs.values(), SHAPE.cl).past(SHAPE.past)
    outputs = runner.run(feeds)
    head = np.asarray(checkpoint.lm_head.numpy(), np.float32)
    if checkpoint.config.family.normalized_head:
        head = head / np.linalg.norm(head, axis=1, keepdims=True)
    scores = outputs[interface.LAST_HIDDEN_STATES][0] @ head.T
    factor, cap = checkpoint.config.logits_multiplier, checkpoint.config.final_logit_softcapping
    scores *= factor
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    np.testing.assert_allclose(outputs[interface.LOGITS][0], scores, atol=1e-3)


def head_of(name: str, folder: Path) -> Path:
    """Write a random head of one layer with its two matrices."""
    config = head_config(family_config(name), 1) | {"tie_word_embeddings": True}
    write_checkpoint(folder, config)
    matrix = np.eye(config["hidden_size"], dtype=np.float32) / 2
    save_file({FC_EMBEDDING: matrix, FC_HIDDEN: matrix}, folder / FC_FILE)
    return folder


@pytest.mark.parametrize("name", ["gemma3", "mistral-window", "smollm3", "llama-llama3"])
def test_a_head_is_written_for_its_target(name: str, tmp_path: Path) -> None:
    """Its one layer sees all and is rotated, though some layers of the target may not."""
    target = write_checkpoint(tmp_path / "target", family_config(name)) / "config.json"
    path = export_draft(head_of(name, tmp_path / "head"), GraphShape(32, 192))
    head = DraftHead.load(path, load_config(target))
    assert (head.n_layers, head.n_vocab) == (1, 64)
    head.write_config(target, tmp_path / "config.json")
    config = load_config(tmp_path / "config.json")
    assert config.num_hidden_layers == 1
    assert config.has_rope(0)
    assert not config.has_window(0)


def test_a_head_without_its_matrices_is_refused(tmp_path: Path) -> None:
    head = head_of("llama-linear", tmp_path / "head")
    tensors = load_file(head / FC_FILE)
    del tensors[FC_HIDDEN]
    save_file(tensors, head / FC_FILE)
    with pytest.raises(ModelFileError, match=FC_HIDDEN):
        export_draft(head, GraphShape(32, 192))


def test_a_family_that_a_release_of_transformers_lacks_has_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = family_keys.read_tables()
    older = {name: table for name, table in tables[4].items() if name != "qwen3"}
    monkeypatch.setattr(family_keys, "read_tables", lambda: {**tables, 4: older})
    assert head_config({"model_type": "qwen3"}, 1)["num_hidden_layers"] == 1
