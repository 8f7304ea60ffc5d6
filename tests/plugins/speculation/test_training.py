"""Trainings on a small random model: what they write, and that they go on where they were cut."""

from pathlib import Path

import numpy as np
import pytest

NEEDED = "training needs torch and transformers: pip install -e '.[train]'"
torch = pytest.importorskip("torch", reason=NEEDED)
transformers = pytest.importorskip("transformers", reason=NEEDED)

from safetensors.torch import load_file  # noqa: E402

from buildlib.errors import InputFileError, ModelFileError  # noqa: E402
from plugins.speculation import descent as descents  # noqa: E402
from plugins.speculation.descent import Budget, Descent  # noqa: E402
from plugins.speculation.draft_model import DraftHead  # noqa: E402
from plugins.speculation.frozen_model import FrozenModel  # noqa: E402
from plugins.speculation.ssd_tensors import SsdTensors  # noqa: E402
from plugins.speculation.train_draft import DraftRecipe, train_draft  # noqa: E402
from plugins.speculation.train_forecast import ForecastRecipe, train_forecast  # noqa: E402
from tests.buildlib.families import family_config, write_checkpoint  # noqa: E402

BUDGET = Budget(steps=6, seconds=600, texts=16)
FORECAST = ForecastRecipe(
    forecast_tokens=2, prefix_length=4, length=24, prompt_length=8, windows=4, places=4
)
DRAFT = DraftRecipe(length=20, prompt_length=8, windows=4)


class Steps:
    """Sees each step, and cuts the training off after one of them."""

    def __init__(self, cut_after: int | None = None, done: int = 0) -> None:
        self.cut_after, self.done = cut_after, done
        self.losses: list[float] = []

    def on_texts(self, done: int, total: int) -> None:
        assert done <= total == BUDGET.texts

    def on_step(self, share: float, step: int, words: str) -> None:
        if len(self.losses) == self.cut_after:
            raise KeyboardInterrupt
        assert share > 0
        assert step == len(self.losses) + self.done + 1
        self.losses.append(float(words.split()[1].strip(",")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), family_config("gemma2"))


@pytest.fixture(scope="module")
def model(folder: Path) -> FrozenModel:
    text = folder / "text.txt"
    characters = np.random.default_rng(1).integers(3, 64, 1200) + 0x100
    text.write_text("".join(map(chr, characters)))
    return FrozenModel.load(folder, text, "cpu")


def forecast(model: FrozenModel, out: Path, watcher: Steps) -> float:
    descent = Descent(out.with_suffix(".training"), {"kind": "forecast"}, BUDGET)
    accepted = train_forecast(model, FORECAST, descent, watcher, out)
    descent.finish()
    return accepted


def test_a_forecast_that_was_cut_off_ends_at_the_same_tensors(
    model: FrozenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descents, "SAVE_EVERY_S", 0.0)
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    watcher = Steps()
    assert 1.0 <= forecast(model, whole, watcher) <= 3.0
    assert watcher.losses[-1] < watcher.losses[0]
    with pytest.raises(KeyboardInterrupt):
        forecast(model, cut, Steps(cut_after=3))
    assert not cut.exists()
    rest = Steps(done=3)
    forecast(model, cut, rest)
    assert len(rest.losses) == 3
    one, other = load_file(whole), load_file(cut)
    for name, tensor in one.items():  # vectors of a loaded state begin at other addresses
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)
    assert {path.name for path in tmp_path.iterdir()} == {whole.name, cut.name}
    tensors = SsdTensors.load(whole, model.config, forecast_tokens=2, prefix_length=4)
    assert tensors.embedding.shape == (2, model.config.hidden_size)


def test_a_draft_head_learns(folder: Path, model: FrozenModel, tmp_path: Path) -> None:
    descent = Descent(tmp_path / "head.training", {"kind": "draft"}, BUDGET)
    watcher = Steps()
    head, accepted = train_draft(model, DRAFT, descent, watcher)
    assert 1.0 <= accepted <= 4.0
    assert watcher.losses[-1] < watcher.losses[0]
    head.save(folder, tmp_path / "head")
    assert DraftHead.load(tmp_path / "head" / "draft_model.onnx", model.config).n_layers == 1


def test_the_state_of_another_training_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "state.training"
    torch.save({"settings": {"seed": 1}, "seconds": 2.0, "step": 5}, place)
    assert Descent(place, {"seed": 1}, BUDGET).step == 5
    with pytest.raises(InputFileError, match="another seed: remove it"):
        Descent(place, {"seed": 2}, BUDGET)
    place.write_bytes(place.read_bytes()[:100])
    with pytest.raises(InputFileError, match="damaged: remove it"):
        Descent(place, {"seed": 1}, BUDGET)


def test_time_ends_a_training(model: FrozenModel, tmp_path: Path) -> None:
    budget = Budget(steps=1_000_000, seconds=2.0, texts=16)
    descent = Descent(tmp_path / "state.training", {}, budget)
    train_draft(model, DRAFT, descent, Steps())
    assert descent.elapsed >= budget.seconds
    assert descent.step < 10_000


def test_what_cannot_be_trained_is_told_in_one_line(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    for content, message in ((b"\xff", "not UTF-8"), ("āăą".encode(), "it has 3 tokens")):
        text.write_bytes(content)
        with pytest.raises(InputFileError, match=message):
            FrozenModel.load(folder, text, "cpu")
    text.write_text(chr(0x110) * 1200)
    other = write_checkpoint(tmp_path / "baichuan", family_config("baichuan"))
    with pytest.raises(ModelFileError, match=r"transformers .* cannot load it") as caught:
        FrozenModel.load(other, text, "cpu")
    assert "\n" not in str(caught.value)
    major = 4 if transformers.__version__.startswith("5") else 5
    config = family_config("olmo2") | {"rope_parameters": {"rope_theta": 7.0}}
    other = write_checkpoint(tmp_path / "other", config | {"transformers_version": f"{major}.0.0"})
    with pytest.raises(ModelFileError, match=r"rope_theta is .* in transformers 4"):
        FrozenModel.load(other, text, "cpu")
