"""Real exports of other tools, imported, compared with PyTorch's results."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from buildlib.builder.canonical import ImportModel, is_canonical
from buildlib.checkpoint.config import load_config
from buildlib.encodings.files import load_encodings
from buildlib.errors import BuildError
from buildlib.graph import interface
from buildlib.graph.interface import token_axis
from buildlib.graph.rope import rope_tables
from buildlib.graph.shape import GraphShape
from buildlib.numerics.runners import OnnxRunner
from buildlib.passes.arcl import convert_arcl
from buildlib.passes.mha2sha import convert_mha2sha
from buildlib.passes.split import split_model
from tests.buildlib.onnx_models import Arrays, assert_near, run_once

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"
NAMES = sorted(folder.name for folder in EXPORTS.iterdir() if (folder / "model.onnx").is_file())
FIXED = {
    "aihub-llama-mha-fixed": GraphShape(4, 16),
    "notebook-llama-mha": GraphShape(4, 16),
    "notebook-llama-heads": GraphShape(4, 16),
    "torchscript-llama-fixed": GraphShape(4, 12),
}

Imported = Callable[[str, GraphShape | None], Path]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """`imported(name, shape)`; exports are copied first, as links stay on a file system."""
    folder = tmp_path_factory.mktemp("imported")
    exports = shutil.copytree(EXPORTS, folder / "exports")

    def make(name: str, shape: GraphShape | None) -> Path:
        out = folder / f"{name}_{shape}" / "model.onnx"
        return out if out.is_file() else ImportModel(shape).run(exports / name / "model.onnx", out)

    return make


@pytest.mark.parametrize(("name", "ar"), [*((name, 4) for name in NAMES), ("dynamo-llama", 1)])
def test_an_import_computes_what_the_source_did(name: str, ar: int, imported: Imported) -> None:
    sample = np.load(EXPORTS / name / "sample.npz")
    logits, caches = _run(imported(name, GraphShape(ar, 16)), name, sample["tokens"][0])
    _assert_near(logits, sample["logits"][0])
    for layer in range(len(caches) // 2):
        keys = caches[interface.past_key(layer, "in")][:, 0].transpose(0, 2, 1)
        _assert_near(keys, sample[f"key_{layer}"])
        _assert_near(caches[interface.past_value(layer, "in")][:, 0], sample[f"value_{layer}"])


@pytest.mark.parametrize("name", sorted(FIXED))
def test_a_fixed_export_keeps_its_own_shape(name: str, imported: Imported) -> None:
    path = imported(name, None)
    assert interface.model_shape(ir.load(path)) == FIXED[name]
    tokens = np.load(EXPORTS / name / "sample.npz")["tokens"][0]
    logits, _ = _run(path, name, tokens)
    _assert_near(logits, np.load(EXPORTS / name / "sample.npz")["logits"][0])


@pytest.mark.parametrize("name", NAMES)
def test_an_import_is_canonical(name: str, imported: Imported, tmp_path: Path) -> None:
    path = imported(name, GraphShape(4, 16))
    model = ir.load(path)
    assert is_canonical(model)
    again = ImportModel().run(path, tmp_path / "again" / "model.onnx")
    assert again.read_bytes() == path.read_bytes()
    for link in (other for other in path.parent.iterdir() if "onnx" not in other.suffix[:5]):
        if link.suffix != ".encodings":  # weights are not written again
            assert link.samefile(path.parents[1] / "exports" / name / link.name)
    other = convert_arcl(path, GraphShape(2, 16), tmp_path / "other" / "model.onnx")
    one_head = convert_mha2sha(other, tmp_path / "sha" / "model.onnx")
    assert_near(run_once(one_head), run_once(other))
    n_layers = sum(str(value.name).startswith("past_key") for value in model.graph.inputs)
    assert len(split_model(path, n_layers, tmp_path / "parts")) == n_layers


@pytest.mark.parametrize(
    "name", [name for name in NAMES if (EXPORTS / name / "model.encodings").is_file()]
)
def test_encodings_follow(name: str, imported: Imported) -> None:
    path = imported(name, GraphShape(4, 16))
    before = load_encodings(EXPORTS / name / "model.encodings")
    after = load_encodings(path.with_suffix(".encodings"))
    assert len(after.param_encodings) == len(before.param_encodings)
    names = {str(value.name) for node in ir.load(path).graph for value in node.outputs}
    assert names <= {encoding.name for encoding in after.activation_encodings}


def test_the_encodings_of_heads_are_joined_to_one_that_holds_them_all(imported: Imported) -> None:
    """AI Hub's export has a projection and a softmax for each head, each with its own grid."""
    source = load_encodings(EXPORTS / "aihub-llama" / "model.encodings")
    path = imported("aihub-llama", GraphShape(4, 16))
    joined = {
        e.name: e for e in load_encodings(path.with_suffix(".encodings")).activation_encodings
    }
    whole = next(e for name, e in joined.items() if name.endswith("_joined"))
    first = next(e for e in source.activation_encodings if e.name == "conv2d")
    low, high = (_range(e.scale[0], e.offset[0], e.bw) for e in (first, whole))
    assert high[0] <= low[0] + whole.scale[0]
    assert high[1] >= low[1] - whole.scale[0]


def test_a_symbolic_export_needs_a_shape(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="symbolic"):
        ImportModel().run(EXPORTS / "torchscript-llama" / "model.onnx", tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_the_rotary_embedding_of_the_source_is_told(tmp_path: Path) -> None:
    importer = ImportModel(GraphShape(4, 16))
    importer.run(EXPORTS / "torchscript-llama-fixed" / "model.onnx", tmp_path / "model.onnx")
    assert importer.rope is not None
    cos, sin = _tables("torchscript-llama-fixed", importer.rope.cos.shape[1], 16)
    where = slice(importer.rope.first, importer.rope.first + len(importer.rope.cos))
    np.testing.assert_allclose(importer.rope.cos, cos[where], atol=1e-5)
    np.testing.assert_allclose(importer.rope.sin, sin[where], atol=1e-5)


def _run(
    path: Path, name: str, tokens: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float32], Arrays]:
    """Prefill by chunks: logits [n, vocab] and caches with all entries."""
    runner = OnnxRunner(path, n_threads=1)
    shapes = {name: port.shape for name, port in runner.ports.inputs.items()}
    ar, cl = shapes[interface.ATTENTION_MASK][2:]
    past = cl - ar
    cos, sin = _tables(name, shapes[interface.COS][3], cl)
    caches = {
        key: np.zeros(
            [cl if axis == token_axis(key) else dim for axis, dim in enumerate(dims)], "f"
        )
        for key, dims in shapes.items()
        if interface.is_kv(key)
    }
    logits, done = [], 0
    while done < len(tokens):
        chunk = tokens[done : done + ar]
        ids = np.zeros((1, ar), np.int32)
        ids[0, : len(chunk)] = chunk
        mask = np.full((1, 1, ar, cl), interface.MASKED, np.float32)
        mask[..., :done] = 0.0
        mask[0, 0, :, past:][np.tril_indices(ar)] = 0.0
        where = np.minimum(np.arange(done, done + ar), cl - 1)
        feeds = {
            interface.INPUT_IDS: ids,
            interface.ATTENTION_MASK: mask,
            interface.COS: cos[None, None, where],
            interface.SIN: sin[None, None, where],
        }
        feeds |= {key: cache.take(range(past), token_axis(key)) for key, cache in caches.items()}
        outputs = runner.run(feeds)
        logits.append(outputs[interface.LOGITS][0, : len(chunk)])
        for key, cache in caches.items():
            new = outputs[interface.kv_output(key)].take(range(len(chunk)), token_axis(key))
            at = [slice(None)] * 4
            at[token_axis(key)] = slice(done, done + len(chunk))
            cache[tuple(at)] = new
        done += len(chunk)
    filled = {key: cache.take(range(done), token_axis(key)) for key, cache in caches.items()}
    return np.concatenate(logits), filled


def _tables(
    name: str, half: int, length: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """From `config.json`, as hosts make them; `test_families.py` checks these formulas."""
    cos, sin = rope_tables(load_config(EXPORTS / name / "config.json"), length)
    assert cos.shape == (length, half)
    return cos, sin


def _assert_near(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> None:
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def _range(scale: float, offset: int, bits: int) -> tuple[float, float]:
    return scale * offset, scale * (offset + (1 << bits) - 1)
