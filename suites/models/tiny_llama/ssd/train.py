"""Trains a forecast prefix: `python -m suites.models.tiny_llama.ssd.train --out FOLDER`.

Forecast tokens stand behind each token of a text. They see it, the trained prefix before it, and
each other; forecast token i says what the model will say i + 1 tokens further. Trained are their
embeddings and the keys and values of the prefix. The model itself stays as it is, so its text does.

It needs torch (extra `train`); the same settings, torch build and threads give the same tensors.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from buildlib.files import atomic_write_bytes
from buildlib.speculative.ssd_tensors import FORECAST_EMBEDDING, prefix_key, prefix_value
from suites.models.tiny_llama.torch_model import (
    Cache,
    Seen,
    decoder_layer,
    hidden_states,
    layer_parameters,
    rms_norm,
)
from suites.models.tiny_llama.trained import TrainedModel, descend, start_training

FILE = "ssd_tensor.safetensors"


@dataclass(frozen=True)
class Recipe:
    """Settings of a training.

    Attributes:
        forecast_tokens: learned, each one token further than the last.
        prefix_length: of the learned keys and values, in tokens.
        texts: of the model's own that it learns to forecast, each `window_length` tokens that begin
            with `prompt_length` tokens of its training text.
        places: of each text where tokens are forecast.
    """

    steps: int = 500
    seed: int = 1
    forecast_tokens: int = 4
    prefix_length: int = 16
    texts: int = 512
    prompt_length: int = 20
    windows: int = 16
    window_length: int = 68
    places: int = 12
    embedding_rate: float = 5e-3
    prefix_rate: float = 2e-2


@dataclass(frozen=True)
class Forecaster:
    """Tensors that are trained.

    Attributes:
        embedding: of the forecast tokens, `[forecast_tokens, hidden]`.
        prefix: of each layer, `[n_kv, prefix_length, head_dim]`.
    """

    embedding: Tensor
    prefix: list[Cache]

    @classmethod
    def create(
        cls, model: TrainedModel, recipe: Recipe, generator: torch.Generator
    ) -> "Forecaster":
        """Start from the mean of all embeddings, and the caches of some text."""
        shape = (recipe.forecast_tokens, model.architecture.hidden_size)
        noise = 0.02 * torch.randn(shape, generator=generator)
        window = model.windows(1, recipe.prefix_length, generator)
        _, caches = hidden_states(model.architecture, model.parameters, window)
        return cls(
            (model.embedding.mean(0) + noise).requires_grad_(),
            [(key[0].requires_grad_(), value[0].requires_grad_()) for key, value in caches],
        )

    def scores(self, model: TrainedModel, ids: Tensor, places: Tensor) -> Tensor:
        """Return scores `[batch, n_places, forecast_tokens, vocab]` of forecasts.

        Args:
            model: the frozen model.
            ids: of the windows, `[batch, length]`.
            places: indices of tokens, `[batch, n_places]`.
        """
        batch, n_places = places.shape
        count = len(self.embedding)
        with torch.no_grad():
            _, caches = hidden_states(model.architecture, model.parameters, ids)
        hidden = self.embedding.repeat(batch, n_places, 1)
        positions = (places[:, :, None] + 1 + torch.arange(count)).flatten(1)
        mask = self._mask(ids.shape[1], places)
        for index, (keys, values) in enumerate(caches):
            first = [own.expand(batch, -1, -1, -1) for own in self.prefix[index]]
            seen = Seen(torch.cat((first[0], keys), 2), torch.cat((first[1], values), 2), mask)
            layer = layer_parameters(model.parameters, index)
            hidden, _ = decoder_layer(model.architecture, layer, hidden, positions, seen)
        normed = rms_norm(model.architecture, hidden, model.parameters["model.norm.weight"])
        return F.linear(normed, model.embedding).view(batch, n_places, count, -1)

    def _mask(self, length: int, places: Tensor) -> Tensor:
        """Mask `[batch, 1, n, prefix + length + n]` of n forecast tokens."""
        batch, n_places = places.shape
        count = len(self.embedding)
        whose = torch.arange(n_places).repeat_interleave(count)
        order = torch.arange(n_places * count)
        each_other = (whose[:, None] == whose) & (order[:, None] >= order)
        prefix = torch.ones(batch, len(whose), self.prefix[0][0].shape[1], dtype=torch.bool)
        text = torch.arange(length) <= places[:, whose, None]
        return torch.cat((prefix, text, each_other.expand(batch, -1, -1)), dim=-1)[:, None]

    def tensors(self) -> dict[str, Tensor]:
        """Name the tensors as the builder reads them."""
        found = {FORECAST_EMBEDDING: self.embedding}
        for index, (key, value) in enumerate(self.prefix):
            found |= {prefix_key(index): key, prefix_value(index): value}
        return {name: tensor.detach().contiguous() for name, tensor in found.items()}


def train(model: TrainedModel, recipe: Recipe) -> Forecaster:
    """Learn to forecast what the model says, on text that it says itself."""
    generator = torch.Generator().manual_seed(recipe.seed)
    forecaster = Forecaster.create(model, recipe, generator)
    _, caches = hidden_states(
        model.architecture, model.parameters, model.windows(8, 128, generator)
    )
    bounds = [(key.abs().max(), value.abs().max()) for key, value in caches]
    low, high = model.embedding.aminmax()
    prompts = model.windows(recipe.texts, recipe.prompt_length, generator)
    texts = model.continued(prompts, recipe.window_length - recipe.prompt_length)
    ahead = torch.arange(recipe.forecast_tokens)

    def loss_of() -> tuple[Tensor, str]:
        ids = texts[torch.randint(recipe.texts, (recipe.windows,), generator=generator)]
        last = recipe.window_length - recipe.forecast_tokens - 1
        places = torch.randint(
            recipe.prompt_length - 1, last, (recipe.windows, recipe.places), generator=generator
        )
        with torch.no_grad():
            hidden, _ = hidden_states(model.architecture, model.parameters, ids)
            said = F.linear(hidden, model.embedding).log_softmax(-1)
        indices = places[:, :, None] + 1 + ahead
        rows = torch.arange(recipe.windows)[:, None, None]
        wanted = said[rows, indices]
        scores = forecaster.scores(model, ids, places).log_softmax(-1)
        loss = F.kl_div(scores, wanted, log_target=True, reduction="none").sum(-1).mean()
        hits = (scores.argmax(-1) == wanted.argmax(-1)).float().mean((0, 1))
        return loss, "hits " + " ".join(f"{hit:.2f}" for hit in hits.tolist())

    def keep_on_the_grids() -> None:
        # Beyond these bounds the quantized tables and caches of the model saturate.
        forecaster.embedding.clamp_(low, high)
        for (key, value), (most_key, most_value) in zip(forecaster.prefix, bounds, strict=True):
            key.clamp_(-most_key, most_key)
            value.clamp_(-most_value, most_value)

    prefix = [tensor for pair in forecaster.prefix for tensor in pair]
    groups: list[dict[str, object]] = [
        {"params": [forecaster.embedding], "lr": recipe.embedding_rate},
        {"params": prefix, "lr": recipe.prefix_rate},
    ]
    descend(groups, recipe.steps, loss_of, keep_on_the_grids)
    return forecaster


def main() -> None:
    """Run the command line."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(description="Train a forecast prefix for tiny_llama.")
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {FILE}")
    options = start_training(parser, recipe.steps, recipe.seed)
    trained = train(TrainedModel.load(), Recipe(steps=options.steps, seed=options.seed))
    options.out.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(options.out / FILE, save(trained.tensors()))


if __name__ == "__main__":
    main()
