"""Trains the weights: `python -m tools.tiny_llama.train --out FOLDER`.

It needs torch (extra `train`). Config, tokenizer and text are those of this folder. All randomness
comes from `--seed`; the same seed, steps, torch build and number of threads give the same weights.
"""

import argparse
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from buildlib.files import atomic_write_bytes
from suites.models import tiny_llama
from tools.tiny_llama.architecture import Architecture
from tools.tiny_llama.tokens import load_tokenizer, stream
from tools.tiny_llama.torch_model import initial_parameters, logits
from tools.tiny_llama.trained import start_training


@dataclass(frozen=True)
class Recipe:
    """Settings of a training. Steps cycle through `lengths`; each sees `batch_tokens` tokens."""

    steps: int = 4500
    seed: int = 1
    batch_tokens: int = 2048
    lengths: tuple[int, ...] = (256, 256, 512)
    peak_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    gradient_norm: float = 1.0
    begin_share: float = 0.25
    """Share of windows whose first token becomes begin-of-text; some runtimes start with it."""

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then half a cosine to 1 % of the peak."""
        if step < self.warmup_steps:
            return self.peak_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def batch(recipe: Recipe, architecture: Architecture, ids: Tensor, step: int) -> Tensor:
    """Return the windows of one step, `[batch, length + 1]`, at random places of `ids` `[n]`."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    length = recipe.lengths[step % len(recipe.lengths)]
    count = max(1, recipe.batch_tokens // length)
    starts = torch.randint(len(ids) - length, (count, 1), generator=generator)
    windows = ids[starts + torch.arange(length + 1)]
    begins = torch.rand(count, generator=generator) < recipe.begin_share
    windows[begins, 0] = architecture.bos_token_id
    return windows


def train(
    recipe: Recipe,
    architecture: Architecture,
    ids: Tensor,
    *,
    log_every: int = 50,
) -> dict[str, Tensor]:
    """Return float32 parameters trained on the text `ids` `[n]`; print the loss on the way."""
    parameters = initial_parameters(architecture, recipe.seed)
    matrices = [tensor for tensor in parameters.values() if tensor.dim() == 2]
    norms = [tensor for tensor in parameters.values() if tensor.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95))
    started = time.monotonic()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        windows = batch(recipe, architecture, ids, step)
        scores = logits(architecture, parameters, windows[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(matrices + norms, recipe.gradient_norm)
        optimizer.step()
        if step % log_every == 0 or step == recipe.steps - 1:
            elapsed = time.monotonic() - started
            print(f"step {step:5d}  loss {loss.item():.4f}  {elapsed:6.0f} s", flush=True)
    return {name: tensor.detach() for name, tensor in parameters.items()}


def save_checkpoint(parameters: Mapping[str, Tensor], out: Path) -> None:
    """Write a checkpoint folder with fp16 weights, the weights atomically."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        if not (out / name).exists():
            shutil.copyfile(tiny_llama.folder() / name, out / name)
    halves = {name: tensor.to(torch.float16) for name, tensor in parameters.items()}
    atomic_write_bytes(out / "model.safetensors", save(halves, metadata={"format": "pt"}))


def main() -> None:
    """Run the command line."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(description="Train the weights of tiny_llama.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    options = start_training(parser, recipe.steps, recipe.seed, threads=2)
    folder = tiny_llama.folder()
    architecture = Architecture.load(folder)
    text = (folder / "text" / "train.txt").read_text(encoding="utf-8")
    ids = torch.from_numpy(stream(load_tokenizer(folder), architecture, text))
    size = architecture.parameter_count()
    print(f"torch {torch.__version__}, {size:,} parameters, {len(ids):,} tokens")
    recipe = Recipe(steps=options.steps, seed=options.seed)
    save_checkpoint(train(recipe, architecture, ids), options.out)


if __name__ == "__main__":
    main()
