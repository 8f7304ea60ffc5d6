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
from pydantic import BaseModel, ConfigDict, Field, field_validator

from buildlib.builder.lora_config import ADAPTER_CONFIG
from buildlib.checkpoint.config import read_object
from buildlib.checkpoint.tensor_file import TensorRef, read_header
from buildlib.errors import ModelFileError

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
                raise ModelFileError(ref.path, f"tensor {ref.name[:80]!r} is not finite")
        return a, b


_NEUTRAL = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
        "eva_config", "inference_mode", "layers_pattern", "loftq_config", "lora_dropout",
        "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
        "qalora_group_size", "rank_pattern", "revision", "runtime_config", "task_type",
    }
)  # fmt: skip
"""Keys that change nothing in the meaning of the stored matrices, but tell of their place and their
training."""

_KEEP_BASE = frozenset({None, True, False, "gaussian", "eva", "orthogonal", "mica"})
"""Values of `init_lora_weights` that leave the base's weights as they are."""

_PATH_IN_PEFT = "base_model.model."


class _PeftConfig(BaseModel):
    """The keys that give the matrices their meaning; any other one is refused where it is set."""

    model_config = ConfigDict(extra="allow", frozen=True)

    peft_type: Literal["LORA"]
    r: Annotated[int, Field(ge=1)]
    lora_alpha: Annotated[float, Field(allow_inf_nan=False)]
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    alpha_pattern: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = None
    target_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    exclude_modules: list[str] | str | None = None

    @field_validator("alpha_pattern")
    @classmethod
    def _patterns_compile(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for pattern in value or {}:
            try:
                re.compile(pattern)
            except (re.error, RecursionError) as error:
                raise ValueError(f"{pattern[:60]!r} is no regular expression") from error
        return value

    def scale(self, path: str, rank: int) -> float:
        """Return the factor of a module's product; the first pattern that fits its path counts."""
        alpha = self.lora_alpha
        for pattern, value in (self.alpha_pattern or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", path.removeprefix(_PATH_IN_PEFT)):
                alpha = value
                break
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def everywhere(self) -> tuple[str, ...]:
        """Return the names of modules that it changes in every layer that has them."""
        targets = self.target_modules
        if not isinstance(targets, list) or self.layers_to_transform is not None:
            return ()
        return () if self.exclude_modules else tuple(name for name in targets if "." not in name)

    def beyond(self) -> str | None:
        """Return the setting that low-rank branches cannot have, or None."""
        if self.bias != "none":
            return f"bias={self.bias} changes biases too"
        if self.init_lora_weights not in _KEEP_BASE:
            return (
                f"init_lora_weights={self.init_lora_weights} changed the base's weights; save it "
                "again with peft's path_initial_model_for_weight_conversion"
            )
        strange = (key for key, value in (self.model_extra or {}).items() if value)
        key = next((key for key in strange if key not in _NEUTRAL), None)
        return None if key is None else f"{key[:60]} goes beyond low-rank branches"


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter as peft stores it; matrices stay in the file.

    Attributes:
        modules: that it changes, in order.
        everywhere: names of modules that it changes in every layer of its model.
    """

    modules: Mapping[Module, LowRank]
    everywhere: tuple[str, ...] = ()


def read_adapter(folder: Path) -> PeftAdapter:
    """Read an adapter."""
    config = _read_config(folder / ADAPTER_CONFIG)
    weights = folder / ADAPTER_WEIGHTS
    halves: dict[Module, dict[str, TensorRef]] = {}
    paths: dict[Module, str] = {}
    for name, ref in read_header(weights).items():
        match = _KEY.search(name)
        if match is None:
            reason = f"tensor {name[:80]!r} is no lora_A or lora_B of a decoder layer"
            raise ModelFileError(weights, reason)
        module = Module(int(match[1]), match[2])
        if match[3] in halves.setdefault(module, {}):
            raise ModelFileError(weights, f"{module} has two lora_{match[3]}")
        halves[module][match[3]] = ref
        paths[module] = name.partition(".lora_")[0]
    if not halves:
        raise ModelFileError(weights, "it holds no tensors")
    modules = {
        module: _low_rank(weights, module, halves[module], config, paths[module])
        for module in sorted(halves)
    }
    return PeftAdapter(modules, config.everywhere())


def _low_rank(
    path: Path, module: Module, halves: Mapping[str, TensorRef], config: _PeftConfig, name: str
) -> LowRank:
    if len(halves) != 2:
        half = min({"A", "B"} - set(halves))
        raise ModelFileError(path, f"{module} has no lora_{half}")
    a, b = halves["A"], halves["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or 0 in a.shape:
        reason = f"{module}: A {list(a.shape)} and B {list(b.shape)} do not fit together"
        raise ModelFileError(path, reason)
    return LowRank(a, b, config.scale(name, a.shape[0]))


def _read_config(path: Path) -> _PeftConfig:
    config = read_object(path, _PeftConfig)
    reason = config.beyond()
    if reason is not None:
        raise ModelFileError(path, f"unsupported: {reason}")
    return config
