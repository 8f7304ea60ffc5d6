"""Training that was cut off goes on from its last save, to the same weights."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from buildlib.files import atomic_write


@dataclass(frozen=True)
class Progress:
    """The state of an unfinished training in one file; `settings` are those of its recipe."""

    path: Path
    settings: Mapping[str, object]
    every: int = 250
    """Steps between two saves."""

    def save(
        self, steps: int, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Note that `steps` steps are done; the file appears at once or not at all."""
        state = {
            "settings": dict(self.settings),
            "steps": steps,
            "parameters": dict(parameters),
            "optimizer": optimizer.state_dict(),
        }
        with atomic_write(self.path) as file:
            torch.save(state, file)

    def restore(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> int:
        """Put the saved state into the arguments; the number of steps done, 0 where none is saved.

        Raises:
            ValueError: the file is damaged, or belongs to a training with other settings.
        """
        if not self.path.exists():
            return 0
        try:
            state = torch.load(self.path, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as cause:
            raise ValueError(f"{self.path} is damaged: remove it to begin anew") from cause
        if state["settings"] != dict(self.settings):
            raise ValueError(f"{self.path} is of another training: remove it to begin anew")
        with torch.no_grad():
            for name, tensor in parameters.items():
                tensor.copy_(state["parameters"][name])
        optimizer.load_state_dict(state["optimizer"])
        steps: int = state["steps"]
        return steps

    def discard(self) -> None:
        """Training is done: the file goes."""
        self.path.unlink(missing_ok=True)
