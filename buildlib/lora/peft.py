"""PEFT adapter: `adapter_config.json` and `adapter_model.safetensors`.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. A module's weight W gets
W + scale * B @ A, with A [rank, in] and B [out, rank].
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buildlib.checkpoint.layout import read_json
from buildlib.checkpoint.tensor_file import TensorRef, read_header
from buildlib.errors import CheckpointError, UnsupportedModelError
from buildlib.validation import first_fault

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_KEY = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)*?(\w+)\.lora_([AB])(?:\.\w+)?\.weight$")

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, order=True)
class Module:
    """A linear module of one decoder layer by its name in the checkpoint, e.g. `q_proj`."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} of layer {self.layer}"


@dataclass(frozen=True)
class LowRank:
    """The two matrices of one module, read when asked for."""

    a: TensorRef
    b: TensorRef
    scale: float

    @property
    def rank(self) -> int:
        """Rows of A, columns of B."""
        return self.a.shape[0]

    def matrices(self) -> tuple[Matrix, Matrix]:
        """Return A [rank, in] and scale * B [out, rank]."""
        a = self.a.numpy().astype(np.float32)
        b = self.b.numpy().astype(np.float32) * np.float32(self.scale)
        for ref, values in ((self.a, a), (self.b, b)):
            if not np.isfinite(values).all():
                raise CheckpointError(ref.path, f"tensor {ref.name[:80]!r} is not finite")
        return a, b


class _PeftConfig(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    peft_type: Literal["LORA"]
    r: Annotated[int, Field(ge=1)]
    lora_alpha: Annotated[float, Field(allow_inf_nan=False)]
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    alpha_pattern: dict[str, float] | None = None

    def scale(self, path: str, rank: int) -> float:
        """Return the factor of a module's product; a pattern names the end of its path."""
        alpha = self.lora_alpha
        for pattern, value in (self.alpha_pattern or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", path):
                alpha = value
                break
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_adapter(folder: Path) -> Mapping[Module, LowRank]:
    """Return all modules of an adapter, in order; matrices stay in the file.

    Raises:
        CheckpointError: a file is missing, corrupt, or contradicts itself.
        UnsupportedModelError: it changes more than linear modules of decoder layers.
    """
    config = _read_config(folder / ADAPTER_CONFIG)
    weights = folder / ADAPTER_WEIGHTS
    halves: dict[Module, dict[str, TensorRef]] = {}
    paths: dict[Module, str] = {}
    for name, ref in read_header(weights).items():
        match = _KEY.search(name)
        if match is None:
            reason = f"tensor {name[:80]!r} is no lora_A or lora_B of a decoder layer"
            raise UnsupportedModelError(weights, reason)
        module = Module(int(match[1]), match[2])
        if match[3] in halves.setdefault(module, {}):
            raise CheckpointError(weights, f"{module} has two lora_{match[3]}")
        halves[module][match[3]] = ref
        paths[module] = name.partition(".lora_")[0]
    if not halves:
        raise CheckpointError(weights, "it holds no tensors")
    return {
        module: _low_rank(weights, module, halves[module], config, paths[module])
        for module in sorted(halves)
    }


def _low_rank(
    path: Path, module: Module, halves: Mapping[str, TensorRef], config: _PeftConfig, name: str
) -> LowRank:
    if len(halves) != 2:
        missing = min({"A", "B"} - set(halves))
        raise CheckpointError(path, f"{module} has no lora_{missing}")
    a, b = halves["A"], halves["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or 0 in a.shape:
        reason = f"{module}: A {list(a.shape)} and B {list(b.shape)} do not fit together"
        raise CheckpointError(path, reason)
    return LowRank(a, b, config.scale(name, a.shape[0]))


def _read_config(path: Path) -> _PeftConfig:
    try:
        config = _PeftConfig.model_validate(read_json(path))
    except ValidationError as error:
        raise CheckpointError(path, str(first_fault(error, _PeftConfig))) from error
    beyond = {
        "use_dora": config.use_dora,
        "fan_in_fan_out": config.fan_in_fan_out,
        "modules_to_save": bool(config.modules_to_save),
        f"bias={config.bias}": config.bias != "none",
    }
    for key, asked in beyond.items():
        if asked:
            raise UnsupportedModelError(path, f"{key} goes beyond low-rank branches")
    return config
