"""Beginning of every recipe: its options, and the trained model and its text as tensors."""

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from suites.models import tiny_llama
from tools.tiny_llama.architecture import Architecture
from tools.tiny_llama.numpy_model import load_weights
from tools.tiny_llama.tokens import load_tokenizer, stream
from tools.tiny_llama.torch_model import Parameters


@dataclass(frozen=True)
class TrainedModel:
    """The reference model, frozen, and the ids `[n]` of its training text."""

    architecture: Architecture
    parameters: Parameters
    ids: Tensor

    @classmethod
    def load(cls) -> Self:
        """Read the checkpoint and `text/train.txt`, which is in the repository alone."""
        folder = tiny_llama.folder()
        architecture = Architecture.load(folder)
        text = (folder / "text" / "train.txt").read_text(encoding="utf-8")
        parameters = {name: torch.from_numpy(array) for name, array in load_weights(folder).items()}
        ids = torch.from_numpy(stream(load_tokenizer(folder), architecture, text))
        return cls(architecture, parameters, ids)


def start_training(
    parser: argparse.ArgumentParser, steps: int, seed: int, threads: int = 1
) -> argparse.Namespace:
    """Parse the command line with the options of all recipes, and make torch repeatable.

    Args:
        parser: has the recipe's own options.
        steps: default of `--steps`, as `seed` and `threads` are of theirs.
    """
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--threads", type=int, default=threads)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(mode=True)
    return options


def random_windows(
    ids: Tensor, count: int, length: int, generator: torch.Generator, bos: int
) -> Tensor:
    """Return windows `[count, length]` at random places of `ids` `[n]`, each led by `bos`."""
    starts = torch.randint(len(ids) - length, (count, 1), generator=generator)
    windows = ids[starts + torch.arange(length)]
    windows[:, 0] = bos
    return windows


def descend(
    groups: Iterable[dict[str, object]],
    steps: int,
    loss_of: Callable[[], Tensor],
) -> None:
    """Run Adam on parameter groups; the rate of each falls by a cosine to a tenth.

    Args:
        groups: as `torch.optim.Adam` takes them.
        steps: of descent.
        loss_of: gives the loss of a fresh batch.
    """
    optimizer = torch.optim.Adam(list(groups))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    began = time.monotonic()
    for step in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            seconds = time.monotonic() - began
            print(f"step {step:5d}  loss {loss.item():.3f}  {seconds:5.0f} s", flush=True)
