"""A draft head, for Eaglet.

The head takes the embedding of a token and the model's hidden state before it, and makes from them,
in one decoder layer of the model's family, the hidden state after it. The model's own output
projection turns that into the next token. Further passes teach the head to go on from its own
states, as it has to where it drafts several tokens.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from buildlib.checkpoint.layout import CONFIG_FILE
from buildlib.files import atomic_folder, atomic_write_bytes
from buildlib.graph.shape import GraphShape
from plugins.speculation.descent import Descent, Watcher
from plugins.speculation.draft_model import (
    FC_EMBEDDING,
    FC_FILE,
    FC_HIDDEN,
    export_draft,
    head_config,
)
from plugins.speculation.frozen_model import FrozenModel, additive, cache_of

_LAYER = "model.layers.0."
_NORM = "model.norm."
_MOST_SCORES = 1 << 25
"""Scores of a batch and pass, which bound the batch where the vocabulary is large."""


@dataclass(frozen=True)
class DraftRecipe:
    """Hyperparameters of a training.

    Attributes:
        length: of the model's own texts, in tokens, which begin with `prompt_length` tokens of the
            given text; half of each batch are from these, half from the given text.
        windows: texts of a batch.
        passes: of the head, each on the states of the one before; the weight of each is half of
            that before.
        rate: of learning, of the head's layer as of the two matrices before it; their unit brings
            embeddings and states to the size that the layer is used to.
        state_weight: of the distance between hidden states, in their standard deviations, against
            that of the tokens that follow from them.
    """

    length: int = 64
    prompt_length: int = 16
    windows: int = 24
    passes: int = 3
    rate: float = 1e-3
    state_weight: float = 1.0


@dataclass(frozen=True)
class TrainableHead:
    """The head in training.

    Attributes:
        network: of the model's class with one layer, and the model's own output projection.
        halves: matrices [hidden, hidden] on embeddings and on states, in their units.
        units: of `halves`.
        table_factor: of rows of the table before the first layer.
        layer_factor: of the inputs of the network, inside of it.
    """

    model: FrozenModel
    network: Any
    halves: tuple[Tensor, Tensor]
    units: tuple[float, float]
    table_factor: float
    layer_factor: float

    @classmethod
    def create(cls, model: FrozenModel, some: Tensor) -> "TrainableHead":
        """Start from the model's last layer, on the mean of embedding and state.

        Args:
            some: text, `[batch, length]`, which shows how large its values are.
        """
        inside, outside = model.embedding_factors()
        with torch.no_grad():
            out = model.network(input_ids=some, output_hidden_states=True, use_cache=False)
        first, before, after = (out.hidden_states[i].square().mean().sqrt() for i in (0, -2, -1))
        half = torch.eye(model.table.shape[1], device=model.device) / 2
        halves = (half.clone().requires_grad_(), half.clone().requires_grad_())
        units = float(before / first), float(before / after)
        return cls(model, _head_network(model), halves, units, inside * outside, outside)

    def parameters(self) -> dict[str, Tensor]:
        """Return the trained tensors by their names in a checkpoint."""
        own = dict(self.network.named_parameters())
        layer = {name: own[name] for name in own if name.startswith((_LAYER, _NORM))}
        return {FC_EMBEDDING: self.halves[0], FC_HIDDEN: self.halves[1], **layer}

    def passes(self, ids: Tensor, states: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return states and scores after each token but the first, of each pass.

        Pass k at a token stands for the k-th drafted token: it reads the state that pass k - 1 has
        before it, and sees keys of the passes before at the tokens that they stand for.

        Args:
            ids: `[batch, length]`.
            states: of the model after `ids`, `[batch, length, hidden]`.
        """
        embeddings = self.table_factor * F.embedding(ids[:, 1:], self.model.table)
        entering = F.linear(embeddings, self.halves[0] * self.units[0])
        cache, results, before = cache_of(()), [], states[:, :-1]
        positions = torch.arange(ids.shape[1] - 1, device=ids.device)
        for number in range(count):
            hidden = entering + F.linear(before, self.halves[1] * self.units[1])
            mask = additive(_seen(positions, number))
            if getattr(self.network.config, "layer_types", None) is not None:
                mask = {"full_attention": mask, "sliding_attention": mask}
            out = self.network(
                inputs_embeds=hidden / self.layer_factor,
                position_ids=positions[None],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=True,
            )
            results.append((out.hidden_states[-1], out.logits))
            before = torch.cat((states[:, :1], out.hidden_states[-1][:, :-1]), dim=1)
        return results

    def save(self, model_dir: Path, out: Path) -> None:
        """Write a checkpoint folder of the head with fp16 weights, and its ONNX beside them."""
        tensors = {name: value.detach() for name, value in self.parameters().items()}
        factors = (self.units[0] * self.table_factor, self.units[1])
        matrices = {
            name: tensors.pop(name) * factor
            for name, factor in zip((FC_EMBEDDING, FC_HIDDEN), factors, strict=True)
        }
        tensors["model.embed_tokens.weight"] = self.model.network.get_output_embeddings().weight
        target = json.loads((model_dir / CONFIG_FILE).read_text(encoding="utf-8"))
        config = head_config(target, 1) | {"tie_word_embeddings": True}
        with atomic_folder(out) as folder:
            atomic_write_bytes(folder / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
            atomic_write_bytes(folder / "model.safetensors", _halved(tensors))
            atomic_write_bytes(folder / FC_FILE, _halved(matrices))
            export_draft(folder, GraphShape(32, 192))


def _halved(tensors: Mapping[str, Tensor]) -> bytes:
    halves = {name: value.cpu().to(torch.float16).contiguous() for name, value in tensors.items()}
    content: bytes = save(halves, metadata={"format": "pt"})
    return content


def _seen(positions: Tensor, number: int) -> Tensor:
    """Return which keys tokens see in the pass `number`, from 0: `[n, (number + 1) * n]`."""
    own, other = positions[:, None], positions[None]
    blocks = [other <= own - number]
    blocks += [other == own - (number - earlier) for earlier in range(1, number + 1)]
    return torch.cat(blocks, -1)


def _head_network(model: FrozenModel) -> Any:  # noqa: ANN401
    """Return a model of one layer, of which this layer and the norm after it are to be trained."""
    config = copy.deepcopy(model.network.config)
    kinds = getattr(config, "layer_types", None)
    for key, value in head_config({}, 1).items():
        if hasattr(config, key) and (key != "sliding_window" or kinds is None):
            setattr(config, key, value)
    network = type(model.network)(config).to(model.device).eval()
    network.set_input_embeddings(model.network.get_input_embeddings())
    network.set_output_embeddings(model.network.get_output_embeddings())
    last = f"model.layers.{model.n_layers - 1}."
    state = model.network.state_dict()
    own = {n.replace(last, _LAYER): v for n, v in state.items() if n.startswith((last, _NORM))}
    network.load_state_dict(own, strict=False)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(requires_grad=name.startswith((_LAYER, _NORM)))
    return network


def train_draft(
    model: FrozenModel, recipe: DraftRecipe, descent: Descent, watcher: Watcher
) -> tuple[TrainableHead, float]:
    """Learn the hidden states of a model, on a text and on text that it says itself.

    Returns:
        The head, and tokens a call that a dialog without branches would accept, with a draft of
        `passes` tokens, on texts that nothing was learned from.
    """
    texts, judged = descent.texts(model, recipe.prompt_length, recipe.length, watcher)
    head = TrainableHead.create(model, texts[:8])
    fitting = _MOST_SCORES // (recipe.length * model.config.vocab_size)
    half = max(1, min(recipe.windows, fitting) // 2)

    def batch(drawn: torch.Generator) -> tuple[Tensor, str]:
        own_text = texts[torch.randint(len(texts), (half,), generator=drawn)]
        ids = torch.cat((model.windows(half, recipe.length, drawn), own_text))
        states, scores = model.states_and_scores(ids)
        aim, unit = scores.argmax(-1), states.std()
        results = head.passes(ids, states, recipe.passes)
        loss = torch.zeros((), device=ids.device)
        for number, (own, drafted) in enumerate(results):
            apart = F.cross_entropy(drafted.flatten(0, 1), aim[:, 1:].flatten())
            distance = F.smooth_l1_loss(own / unit, states[:, 1:] / unit)
            loss = loss + 0.5**number * (recipe.state_weight * distance + apart)
        return loss, f"{accepted([s for _, s in results], aim):.2f} tokens a call"

    parameters = head.parameters()
    descent.run(parameters, dict.fromkeys(parameters, recipe.rate), batch, watcher)
    figures = []
    with torch.no_grad():
        for ids in judged.split(2 * half):
            states, scores = model.states_and_scores(ids)
            results = head.passes(ids, states, recipe.passes)
            figures.append(accepted([s for _, s in results], scores.argmax(-1)))
    return head, sum(figures) / len(figures)


def accepted(drafted: list[Tensor], wanted: Tensor) -> float:
    """Return the mean number of tokens a call where each draft has one token for each pass.

    Args:
        drafted: scores of each pass after all tokens but the first, `[batch, length - 1, vocab]`.
        wanted: tokens that the model says after all, `[batch, length]`.
    """
    count = wanted.shape[1] - len(drafted)
    right = torch.ones(wanted.shape[0], count, dtype=torch.bool, device=wanted.device)
    total = torch.ones(right.shape, device=wanted.device)
    for number, scores in enumerate(drafted):
        hits = scores.argmax(-1) == wanted[:, 1:]
        right = right & hits[:, number : number + count]
        total = total + right
    return float(total.mean())
