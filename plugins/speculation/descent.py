"""Gradient descent that ends in time, tells how far it is, and goes on after a kill."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from buildlib.errors import InputFileError
from buildlib.files import atomic_path
from plugins.speculation.frozen_model import FrozenModel

SAVE_EVERY_S = 20.0
_FLOOR = 0.1
"""Share of the learning rate that is left at the end."""


@dataclass(frozen=True)
class Budget:
    """Limit of a training: the first of these to be reached ends it.

    Attributes:
        seconds: of the whole training, with the texts that the model writes for it; those before a
            kill count.
        texts: that the model writes; the first sixteenth of them is for figures alone.
    """

    steps: int
    seconds: float
    seed: int = 1
    texts: int = 512


class Watcher(Protocol):
    """Sees how far a training is."""

    def on_texts(self, done: int, total: int) -> None:
        """See how many texts the model has written."""

    def on_step(self, share: float, step: int, words: str) -> None:
        """See which share of the budget is used after a step, and figures of that step."""


Batch = Callable[[torch.Generator], tuple[Tensor, str]]
"""Gives the loss of a fresh batch, and its figures in words."""


class Descent:
    """Adam on named tensors with rates that fall by a cosine, and its state in a file.

    Each step draws from a generator of its own, so a training that goes on from its file takes the
    steps that it would have taken.

    Args:
        place: file of the state; a training there goes on.
        settings: all that decides the result.
        budget: limit of steps and time.

    Raises:
        InputFileError: `place` is damaged, or of a training with other settings.
    """

    def __init__(self, place: Path, settings: Mapping[str, object], budget: Budget) -> None:
        self._place, self._settings, self._budget = place, dict(settings), budget
        self._state = self._load()
        self._began = time.monotonic() - float(self._state.get("seconds", 0.0))

    @property
    def elapsed(self) -> float:
        """Seconds of training, with those before a kill."""
        return time.monotonic() - self._began

    @property
    def step(self) -> int:
        """Number of steps that are done."""
        return int(self._state.get("step", 0))

    def texts(
        self, model: FrozenModel, prompt_length: int, length: int, watcher: Watcher
    ) -> tuple[Tensor, Tensor]:
        """Return texts that the model writes by itself, once for a training.

        Args:
            prompt_length: tokens of the given text with which each begins.
            length: in tokens, of each.

        Returns:
            Ids `[n, length]` to learn from, and such for figures alone.
        """
        total = self._budget.texts
        if "texts" not in self._state:
            generator = torch.Generator().manual_seed(self._budget.seed)
            prompts = model.windows(total, prompt_length, generator)
            new_texts = model.continued(
                prompts, length - prompt_length, lambda done: watcher.on_texts(done, total)
            )
            self._state["texts"] = new_texts.cpu()
            self._save()
        texts: Tensor = self._state["texts"].to(model.device)
        apart = max(1, total // 16)
        return texts[apart:], texts[:apart]

    def run(
        self,
        tensors: Mapping[str, Tensor],
        rates: Mapping[str, float],
        batch: Batch,
        watcher: Watcher,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Train `tensors` in place.

        Args:
            tensors: leaves that need gradients.
            rates: of learning at the beginning, by the names of `tensors`.
            batch: the loss, given a generator to draw from.
            after: is called after each step, to keep tensors within bounds.
        """
        groups = [{"params": [tensors[name]], "lr": rates[name]} for name in tensors]
        optimizer = torch.optim.Adam(groups)
        if "optimizer" in self._state:
            optimizer.load_state_dict(self._state["optimizer"])
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(self._state["tensors"][name])
        last_save = time.monotonic()
        while (share := self._share) < 1.0:
            for group, rate in zip(optimizer.param_groups, rates.values(), strict=True):
                cosine = (1 + math.cos(math.pi * share)) / 2
                group["lr"] = rate * (_FLOOR + (1 - _FLOOR) * cosine)
            generator = torch.Generator().manual_seed(self._budget.seed * 1_000_003 + self.step)
            loss, words = batch(generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                after()
            self._state["step"] = self.step + 1
            watcher.on_step(self._share, self.step, f"loss {loss.item():.3f}, {words}")
            if time.monotonic() - last_save > SAVE_EVERY_S:
                self._state["optimizer"] = optimizer.state_dict()
                self._state["tensors"] = {name: value.detach() for name, value in tensors.items()}
                self._save()
                last_save = time.monotonic()

    def finish(self) -> None:
        """Remove the state, once the result is written."""
        self._place.unlink(missing_ok=True)

    @property
    def _share(self) -> float:
        """Used share of the budget."""
        return max(self.step / self._budget.steps, self.elapsed / self._budget.seconds)

    def _save(self) -> None:
        state = self._state | {"settings": self._settings, "seconds": self.elapsed}
        with atomic_path(self._place) as temporary:
            torch.save(state, temporary)

    def _load(self) -> dict[str, Any]:
        if not self._place.exists():
            return {}
        advice = "remove it to begin anew"
        try:
            state = torch.load(self._place, weights_only=True)
            settings = state["settings"]
        except Exception as error:  # pickle, zipfile and torch raise many kinds
            reason = f"it is no state of a training, or damaged: {advice}"
            raise InputFileError(str(self._place), reason) from error
        other = [key for key, value in self._settings.items() if settings.get(key) != value]
        if other:
            reason = f"it is of a training with another {', '.join(other)}: {advice}"
            raise InputFileError(str(self._place), reason)
        return dict(state)
