"""Trains a draft head: `python -m suites.models.tiny_llama.eaglet.train --out FOLDER`.

The head takes the embedding of a token and the model's hidden state before it, and makes from them,
in one decoder layer, the hidden state after it. The model's own output projection turns that into
the next token. A second pass on the head's own states teaches it to go on from them. The model
itself stays as it is, so its text does.

It needs torch (extra `train`); the same settings, torch build and threads give the same head. The
head is written as `draft_model.onnx`, what `EagletBuilderConfig(draft_model_path=)` takes.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from buildlib.files import atomic_write_bytes
from buildlib.graph.shape import GraphShape
from buildlib.speculative.draft_model import FC_EMBEDDING, FC_HIDDEN, export_draft
from suites.models import tiny_llama
from suites.models.tiny_llama.torch_model import (
    decoder_layer,
    hidden_states,
    layer_parameters,
    rms_norm,
)
from suites.models.tiny_llama.trained import TrainedModel, descend, start_training


@dataclass(frozen=True)
class Recipe:
    """Settings of a training: `steps` of `windows` texts with `length` tokens each.

    Attributes:
        texts: of the model's own, `length` tokens that begin with `prompt_length` tokens of its
            training text; half of each batch are from these, half from the training text.
    """

    steps: int = 600
    seed: int = 1
    windows: int = 24
    length: int = 64
    texts: int = 512
    prompt_length: int = 16
    rate: float = 1e-3
    state_weight: float = 2.0
    """Of the distance between hidden states, against that of the tokens that follow from them."""


Head = dict[str, Tensor]
"""`fc.weight` [hidden, 2 hidden] on (embedding, state), a decoder layer, and `norm.weight`."""


def initial_head(model: TrainedModel) -> Head:
    """Start from the model's last layer, on the mean of embedding and state."""
    layer = layer_parameters(model.parameters, model.architecture.num_hidden_layers - 1)
    half = torch.eye(model.architecture.hidden_size) / 2
    start = {
        "fc.weight": torch.cat((half, half), dim=1),
        **layer,
        "norm.weight": model.parameters["model.norm.weight"],
    }
    return {name: tensor.clone().requires_grad_() for name, tensor in start.items()}


def draft(model: TrainedModel, head: Head, embeddings: Tensor, states: Tensor) -> Tensor:
    """Return hidden states `[batch, length, hidden]` after tokens, from those before them."""
    hidden = F.linear(torch.cat((embeddings, states), dim=-1), head["fc.weight"])
    positions = torch.arange(hidden.shape[1])
    hidden, _ = decoder_layer(model.architecture, head, hidden, positions)
    return rms_norm(model.architecture, hidden, head["norm.weight"])


def train(model: TrainedModel, recipe: Recipe) -> Head:
    """Learn the hidden states of the model on its training text, and on text that it says."""
    generator = torch.Generator().manual_seed(recipe.seed)
    head = initial_head(model)
    prompts = model.windows(recipe.texts, recipe.prompt_length, generator)
    said = model.continued(prompts, recipe.length - recipe.prompt_length)
    half = recipe.windows // 2

    def distance(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss of hidden states, and the share of tokens that they agree on."""
        scores = F.linear(found, model.embedding)
        tokens = F.linear(wanted, model.embedding)
        apart = F.cross_entropy(scores.flatten(0, 1), tokens.argmax(-1).flatten())
        loss = recipe.state_weight * F.smooth_l1_loss(found, wanted) + apart
        return loss, (scores.argmax(-1) == tokens.argmax(-1)).float().mean()

    def loss_of() -> tuple[Tensor, str]:
        own_text = said[torch.randint(recipe.texts, (half,), generator=generator)]
        ids = torch.cat((model.windows(half, recipe.length, generator), own_text))
        with torch.no_grad():
            states, _ = hidden_states(model.architecture, model.parameters, ids)
        embeddings = model.embedding[ids]
        first = draft(model, head, embeddings[:, 1:], states[:, :-1])
        own = torch.cat((states[:, :1], first[:, :-2]), dim=1)
        second = draft(model, head, embeddings[:, 2:], own)
        loss, hits = distance(first, states[:, 1:])
        more, own_hits = distance(second, states[:, 2:])
        return loss + more / 2, f"hits {hits.item():.2f} {own_hits.item():.2f}"

    descend([{"params": list(head.values()), "lr": recipe.rate}], recipe.steps, loss_of)
    return {name: tensor.detach() for name, tensor in head.items()}


def save_head(model: TrainedModel, head: Head, out: Path) -> None:
    """Write a checkpoint folder of the head with fp16 weights, and its ONNX beside them."""
    width = model.architecture.hidden_size
    tensors = {
        FC_EMBEDDING: head["fc.weight"][:, :width],
        FC_HIDDEN: head["fc.weight"][:, width:],
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": head["norm.weight"],
    }
    for name, tensor in head.items():
        if name not in {"fc.weight", "norm.weight"}:
            tensors[f"model.layers.0.{name}"] = tensor
    halves = {name: tensor.to(torch.float16).contiguous() for name, tensor in tensors.items()}
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((tiny_llama.folder() / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"num_hidden_layers": 1}, indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
    atomic_write_bytes(out / "model.safetensors", save(halves, metadata={"format": "pt"}))
    export_draft(out, GraphShape(32, 192))


def main() -> None:
    """Run the command line."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(description="Train a draft head for tiny_llama.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    options = start_training(parser, recipe.steps, recipe.seed)
    model = TrainedModel.load()
    head = train(model, Recipe(steps=options.steps, seed=options.seed))
    save_head(model, head, options.out)


if __name__ == "__main__":
    main()
