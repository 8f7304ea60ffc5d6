"""What is trained with transformers' models is what the builder's graphs compute, per family."""

from pathlib import Path

import numpy as np
import pytest

NEEDED = "training needs torch and transformers: pip install -e '.[train]'"
torch = pytest.importorskip("torch", reason=NEEDED)
pytest.importorskip("transformers", reason=NEEDED)

from buildlib.checkpoint.checkpoint import Checkpoint  # noqa: E402
from buildlib.embedding.extraction import EmbeddingExtraction  # noqa: E402
from buildlib.graph import interface  # noqa: E402
from buildlib.graph.decoder import export_onnx  # noqa: E402
from buildlib.graph.shape import GraphShape  # noqa: E402
from buildlib.numerics.feeds import CallInputs  # noqa: E402
from buildlib.numerics.runners import OnnxRunner  # noqa: E402
from plugins.speculation.frozen_model import FrozenModel  # noqa: E402
from plugins.speculation.ssd_tensors import (  # noqa: E402
    FORECAST_EMBEDDING,
    prefix_key,
    prefix_value,
)
from plugins.speculation.train_draft import TrainableHead  # noqa: E402
from plugins.speculation.train_forecast import Forecaster, ForecastRecipe, graph_keys  # noqa: E402
from tests.buildlib.families import FIXTURES, family_config, write_checkpoint  # noqa: E402

FAMILIES = sorted(
    path.stem
    for path in FIXTURES.glob("*.json")
    if path.stem != "phi3-longrope-beyond"  # by the length of the context, other frequencies
)
PREFIX, FORECASTS, TEXT, PLACE = 4, 3, 24, 20
SHAPE = GraphShape(FORECASTS, 48)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, FrozenModel]:
    folder = write_checkpoint(tmp_path / "model", family_config(request.param))
    characters = np.random.default_rng(1).integers(3, 64, 1200) + 0x100
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, characters)))
    return folder, FrozenModel.load(folder, text, "cpu")


def test_forecasts_are_those_of_the_graph(model: tuple[Path, FrozenModel], tmp_path: Path) -> None:
    folder, frozen = model
    torch.manual_seed(2)
    some = frozen.windows(2, TEXT, torch.Generator().manual_seed(1))
    recipe = ForecastRecipe(forecast_tokens=FORECASTS, prefix_length=PREFIX)
    forecaster = Forecaster.create(frozen, recipe, some)
    with torch.no_grad():
        for tensor in forecaster.tensors.values():
            tensor.add_(torch.randn_like(tensor))
        found, _ = forecaster.scores(some[:1], torch.tensor([PLACE]))
    stored = {name: value.numpy() for name, value in forecaster.stored().items()}
    caches, _ = frozen.caches(some[:1], torch.tensor([0]))

    plain = export_onnx(Checkpoint.load(folder), SHAPE, tmp_path / "plain")
    EmbeddingExtraction().run(plain, tmp_path / "graph" / "model.onnx")
    rows = stored[FORECAST_EMBEDDING][None]
    inputs = CallInputs(frozen.config, SHAPE.cl, embed=lambda _: rows)
    feeds = inputs.at(SHAPE.ar, PLACE + 1, [0] * FORECASTS)
    mask = np.full((FORECASTS, SHAPE.cl), interface.MASKED, dtype=np.float32)
    mask[:, : PREFIX + PLACE + 1] = 0.0
    mask[:, SHAPE.past :][np.tril_indices(FORECASTS)] = 0.0
    feeds[interface.ATTENTION_MASK] = mask[None, None]
    free = SHAPE.past - PREFIX - TEXT
    for index, (keys, values) in enumerate(caches):
        text_keys = graph_keys(frozen.config, index, keys[0]).numpy()
        past_keys = np.concatenate((stored[prefix_key(index)], text_keys), 1)
        past_values = np.concatenate((stored[prefix_value(index)], values[0].numpy()), 1)
        past_keys, past_values = (
            np.pad(past, ((0, 0), (0, free), (0, 0))) for past in (past_keys, past_values)
        )
        feeds[interface.past_key(index, "in")] = past_keys.transpose(0, 2, 1)[:, None]
        feeds[interface.past_value(index, "in")] = past_values[:, None]
    logits = OnnxRunner(tmp_path / "graph" / "model.onnx").run(feeds)[interface.LOGITS]
    np.testing.assert_allclose(logits[0], found[0, 0].numpy(), atol=2e-4, rtol=1e-3)


def test_a_head_is_the_same_as_onnx(model: tuple[Path, FrozenModel], tmp_path: Path) -> None:
    folder, frozen = model
    torch.manual_seed(2)
    ids = frozen.windows(1, 33, torch.Generator().manual_seed(1))
    head = TrainableHead.create(frozen, ids)
    states, _ = frozen.states_and_scores(ids)
    with torch.no_grad():
        for tensor in head.parameters().values():
            tensor.copy_((tensor + 0.1 * torch.randn_like(tensor)).half())
        ((expected, scores),) = head.passes(ids, states, 1)
    head.save(folder, tmp_path / "head")

    inputs = CallInputs(frozen.config, 192, rotations_cl=33)
    feeds = inputs.at(32, 0, ids[0, 1:].tolist())
    feeds[interface.INPUTS_EMBEDS] = frozen.table[ids[:, 1:]].numpy()
    feeds[interface.HIDDEN_STATES] = states[:, :-1].numpy()
    config = frozen.config
    past = (config.num_key_value_heads, 1, config.head_dim, 160)
    feeds[interface.past_key(0, "in")] = np.zeros(past, np.float32)
    feeds[interface.past_value(0, "in")] = np.zeros((*past[:2], 160, past[2]), np.float32)
    found = OnnxRunner(tmp_path / "head" / "draft_model.onnx").run(feeds)
    size = float(expected.abs().max())
    np.testing.assert_allclose(
        found[interface.LAST_HIDDEN_STATES], expected.numpy(), atol=2e-3 * size
    )
    agree = found[interface.LOGITS].argmax(-1) == scores.argmax(-1).numpy()
    assert agree.mean() > 0.9
