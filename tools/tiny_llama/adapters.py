"""Trains the adapters: `python -m tools.tiny_llama.adapters --out FOLDER`.

Each is a low-rank change of every projection, learned on a text of its own, and written as a PEFT
folder. The model itself stays as it is.

It needs torch (extra `train`); the same settings, torch build and threads give the same adapters.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from buildlib.builder.lora_config import ADAPTER_CONFIG
from buildlib.files import atomic_write_bytes
from plugins.lora.peft import ADAPTER_WEIGHTS
from suites.models import tiny_llama
from suites.models.tiny_llama import lora
from tools.tiny_llama.tokens import load_tokenizer, plain
from tools.tiny_llama.torch_model import Parameters, logits
from tools.tiny_llama.trained import TrainedModel, descend, random_windows, start_training


@dataclass(frozen=True)
class Recipe:
    """Settings of a training.

    Attributes:
        scale: of the product of both matrices, PEFT's `lora_alpha / r`.
    """

    steps: int = 160
    seed: int = 1
    rank: int = 8
    scale: float = 2.0
    windows: int = 12
    window_length: int = 96
    rate: float = 2e-3


Adapter = dict[str, tuple[Tensor, Tensor]]
"""A [rank, in] and B [out, rank] by the name of the weight that their product changes."""


def initial_adapter(model: TrainedModel, recipe: Recipe, generator: torch.Generator) -> Adapter:
    """Start with random A and zero B, which change nothing."""
    found = {}
    for name, weight in model.parameters.items():
        if name.endswith("_proj.weight"):
            n_out, n_in = weight.shape
            a = torch.randn((recipe.rank, n_in), generator=generator) / n_in**0.5
            found[name] = (a.requires_grad_(), torch.zeros(n_out, recipe.rank, requires_grad=True))
    return found


def adapted(model: TrainedModel, adapter: Adapter, scale: float) -> Parameters:
    """Return the parameters of the model with an adapter."""
    changed = {name: model.parameters[name] + scale * (b @ a) for name, (a, b) in adapter.items()}
    return {**model.parameters, **changed}


def perplexity(model: TrainedModel, parameters: Parameters, ids: Tensor, length: int) -> float:
    """Return the perplexity of a text in whole windows of `length` tokens."""
    windows = ids[: len(ids) // length * length].view(-1, length)
    with torch.no_grad():
        scores = logits(model.architecture, parameters, windows[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
    return float(loss.exp())


def train(model: TrainedModel, recipe: Recipe, ids: Tensor) -> Adapter:
    """Learn an adapter on the text `ids` `[n]`."""
    generator = torch.Generator().manual_seed(recipe.seed)
    adapter = initial_adapter(model, recipe, generator)

    def loss_of() -> Tensor:
        bos = model.architecture.bos_token_id
        windows = random_windows(ids, recipe.windows, recipe.window_length, generator, bos)
        parameters = adapted(model, adapter, recipe.scale)
        scores = logits(model.architecture, parameters, windows[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())

    matrices = [matrix for pair in adapter.values() for matrix in pair]
    descend([{"params": matrices, "lr": recipe.rate}], recipe.steps, loss_of)
    return {name: (a.detach(), b.detach()) for name, (a, b) in adapter.items()}


def save_adapter(adapter: Adapter, recipe: Recipe, out: Path) -> None:
    """Write a PEFT folder with fp16 weights."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in adapter.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = a.to(torch.float16).contiguous()
        tensors[f"{module}.lora_B.weight"] = b.to(torch.float16).contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny_llama",
        "r": recipe.rank,
        "lora_alpha": recipe.rank * recipe.scale,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-2] for name in adapter}),
    }
    (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    atomic_write_bytes(out / ADAPTER_WEIGHTS, save(tensors, metadata={"format": "pt"}))


def main() -> None:
    """Run the command line."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(description="Train the adapters of tiny_llama.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the PEFT folders")
    options = start_training(parser, recipe.steps, recipe.seed)
    recipe = Recipe(steps=options.steps, seed=options.seed)
    model, tokenizer = TrainedModel.load(), load_tokenizer(tiny_llama.folder())
    texts = {
        name: torch.from_numpy(plain(tokenizer, lora.heldout_text(name))) for name in lora.NAMES
    }
    for name in lora.NAMES:
        print(name)
        ids = torch.from_numpy(plain(tokenizer, lora.training_text(name)))
        adapter = train(model, recipe, ids)
        save_adapter(adapter, recipe, options.out / name)
        parameters = adapted(model, adapter, recipe.scale)
        for other, text in texts.items():
            before = perplexity(model, model.parameters, text, recipe.window_length)
            after = perplexity(model, parameters, text, recipe.window_length)
            print(f"perplexity of {other}, held out: {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main()
