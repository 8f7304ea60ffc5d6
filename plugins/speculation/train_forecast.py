"""Forecast tokens and their prefix, for self-speculative decoding.

Forecast tokens stand behind each token of a text. They see it, the trained prefix before it, and
each other; forecast token i says the model's token i + 1 tokens further. Trained are their
embeddings, and the keys and values of the prefix.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from buildlib.checkpoint.config import DecoderConfig
from buildlib.files import atomic_write_bytes
from buildlib.graph.rope import rotation_length
from plugins.speculation.descent import Descent, Watcher
from plugins.speculation.frozen_model import FrozenModel, cache_of
from plugins.speculation.ssd_tensors import FORECAST_EMBEDDING, prefix_key, prefix_value

_EMBEDDING = "embedding"
_MOST_SCORES = 1 << 25
"""Scores of forecasts in a batch, which bound its size where the vocabulary is large."""
_TREE = (3, 2)
"""Candidates of the first and the second forecast that count in figures: a dialog's default."""


@dataclass(frozen=True)
class ForecastRecipe:
    """Hyperparameters of a training.

    Attributes:
        forecast_tokens: learned, each one token further than the last.
        prefix_length: of the learned keys and values, in tokens.
        length: of the texts, in tokens, which begin with `prompt_length` tokens of the given text.
        windows: texts of a batch.
        places: of each text where tokens are forecast.
        embedding_rate: in standard deviations of the embedding table.
        prefix_rate: in standard deviations of the keys, or values, of a layer.
    """

    forecast_tokens: int = 4
    prefix_length: int = 16
    length: int = 68
    prompt_length: int = 20
    windows: int = 16
    places: int = 12
    embedding_rate: float = 0.05
    prefix_rate: float = 0.02


@dataclass(frozen=True)
class Forecaster:
    """Trained parameters, in units of the model's own.

    Attributes:
        tensors: rows of forecast tokens `[forecast_tokens, hidden]`, keys and values of each layer
            `[n_kv, prefix_length, head_dim]`.
        scales: their units, the standard deviations of the model's own.
        bounds: least and greatest of the model's own, in these units.
        factor: of rows inside of the model's lookup.
    """

    model: FrozenModel
    tensors: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]
    bounds: Mapping[str, tuple[Tensor, Tensor]]
    factor: float

    @classmethod
    def create(cls, model: FrozenModel, recipe: ForecastRecipe, some: Tensor) -> "Forecaster":
        """Start from the mean of all embeddings, and the caches of some text.

        Args:
            some: ids `[batch, length]`.
        """
        caches, _ = model.caches(some, torch.tensor([0], device=some.device))
        table, prefix = model.table, recipe.prefix_length
        generator = torch.Generator().manual_seed(recipe.forecast_tokens)
        noise = torch.randn((recipe.forecast_tokens, table.shape[1]), generator=generator)
        whole = {_EMBEDDING: table}
        start = {_EMBEDDING: table.mean(0) + 0.1 * table.std() * noise.to(table.device)}
        for index, (keys, values) in enumerate(caches):
            for name, cache in ((prefix_key(index), keys), (prefix_value(index), values)):
                whole[name], start[name] = cache, cache[0, :, :prefix]
        scales = {name: tensor.std() for name, tensor in whole.items()}
        tensors = {name: (start[name] / scales[name]).requires_grad_() for name in start}
        # Beyond these bounds the quantized tables and caches of the model saturate.
        bounds = {
            name: (tensor.amin() / scales[name], tensor.amax() / scales[name])
            for name, tensor in whole.items()
        }
        inside, _ = model.embedding_factors()
        return cls(model, tensors, scales, bounds, inside)

    def keep_within_bounds(self) -> None:
        """Move values outside of the model's own ranges to their ends, in place."""
        for name, tensor in self.tensors.items():
            tensor.clamp_(*self.bounds[name])

    def value(self, name: str) -> Tensor:
        """Return a tensor in the model's units."""
        return self.tensors[name] * self.scales[name]

    def scores(self, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores of forecasts, and those of the model itself after the same tokens.

        Args:
            ids: of the windows, `[batch, length]`.
            places: indices of tokens, `[n_places]`.

        Returns:
            Two of `[batch, n_places, forecast_tokens, vocab]`.
        """
        rows, batch = self.value(_EMBEDDING), len(ids)
        count = len(rows)
        ahead = (places[:, None] + 1 + torch.arange(count)).flatten().to(ids.device)
        caches, aim = self.model.caches(ids, ahead)
        layers = []
        for index, (keys, values) in enumerate(caches):
            own = [
                self.value(name)[None].expand(batch, -1, -1, -1)
                for name in (prefix_key(index), prefix_value(index))
            ]
            layers.append((torch.cat((own[0], keys), 2), torch.cat((own[1], values), 2)))
        out = self.model.network(
            inputs_embeds=(rows * self.factor).repeat(batch, len(places), 1),
            position_ids=ahead.expand(batch, -1),
            attention_mask=self.model.masks(self._seen(ids.shape[1], places).to(ids.device)),
            past_key_values=cache_of(layers),
            use_cache=True,
        )
        shape = (batch, len(places), count, -1)
        return out.logits.view(shape), aim.view(shape)

    def _seen(self, length: int, places: Tensor) -> Tensor:
        """Return which keys forecast tokens see, `[n, prefix + length + n]`."""
        count, prefix = len(self.tensors[_EMBEDDING]), self.tensors[prefix_key(0)].shape[1]
        whose = torch.arange(len(places)).repeat_interleave(count)
        order = torch.arange(len(whose))
        each_other = (whose[:, None] == whose) & (order[:, None] >= order)
        text = torch.arange(length) <= places[whose, None]
        return torch.cat((torch.ones(len(whose), prefix, dtype=torch.bool), text, each_other), -1)

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors as the builder reads them."""
        tensors = {FORECAST_EMBEDDING: self.value(_EMBEDDING)}
        for index in range(self.model.n_layers):
            key, value = prefix_key(index), prefix_value(index)
            tensors[key] = graph_keys(self.model.config, index, self.value(key))
            tensors[value] = self.value(value)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def graph_keys(config: DecoderConfig, layer: int, keys: Tensor) -> Tensor:
    """Turn rotated keys of transformers `[..., head_dim]` into those of the builder's graphs.

    Where neighbours turn, a graph has even dimensions before odd ones. Keys keep their lengths,
    which a rotary scaling changes elsewhere.
    """
    if not config.has_rope(layer):
        return keys
    turned, rest = keys[..., : config.rotary_dim], keys[..., config.rotary_dim :]
    if config.family.interleaved:
        turned = torch.cat((turned[..., ::2], turned[..., 1::2]), -1)
    length = 1.0 if config.has_local_rope(layer) else rotation_length(config)
    return torch.cat((turned / length, rest), -1)


def train_forecast(
    model: FrozenModel, recipe: ForecastRecipe, descent: Descent, watcher: Watcher, out: Path
) -> float:
    """Learn to forecast a model on text that it says itself, and write the result.

    Returns:
        Tokens a call that a dialog would accept on texts that nothing was learned from.
    """
    texts, judged = descent.texts(model, recipe.prompt_length, recipe.length, watcher)
    forecaster = Forecaster.create(model, recipe, texts[:8])
    first, last = recipe.prompt_length - 1, recipe.length - recipe.forecast_tokens - 1
    each = recipe.places * recipe.forecast_tokens * model.config.vocab_size
    windows = max(1, min(recipe.windows, _MOST_SCORES // each))

    def batch(drawn: torch.Generator) -> tuple[Tensor, str]:
        ids = texts[torch.randint(len(texts), (windows,), generator=drawn)]
        places = first + torch.randperm(last - first, generator=drawn)[: recipe.places]
        scores, aim = forecaster.scores(ids, places)
        loss = F.kl_div(
            scores.log_softmax(-1), aim.log_softmax(-1), log_target=True, reduction="none"
        )
        return loss.sum(-1).mean(), f"{accepted(scores, aim):.2f} tokens a call"

    rates = dict.fromkeys(forecaster.tensors, recipe.prefix_rate)
    rates[_EMBEDDING] = recipe.embedding_rate
    descent.run(forecaster.tensors, rates, batch, watcher, forecaster.keep_within_bounds)
    with torch.no_grad():
        places = torch.arange(first, last, 4)
        figures = [accepted(*forecaster.scores(ids, places)) for ids in judged.split(windows)]
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(out, save(forecaster.stored()))
    return sum(figures) / len(figures)


def accepted(scores: Tensor, wanted: Tensor) -> float:
    """Return the mean number of tokens a call with the candidates of a default dialog.

    Args:
        scores: of forecasts `[batch, n_places, forecast_tokens, vocab]`.
        wanted: of the model, of the same shape.
    """
    right = torch.ones(scores.shape[:2], dtype=torch.bool, device=scores.device)
    count = torch.ones(scores.shape[:2], device=scores.device)
    for depth, candidates in enumerate(_TREE[: scores.shape[2]]):
        token = wanted[:, :, depth].argmax(-1, keepdim=True)
        best = scores[:, :, depth].topk(candidates, dim=-1).indices
        right = right & (best == token).any(-1)
        count = count + right
    return float(count.mean())
