"""Tensors of a step on a device, as the runner dumps them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buildlib.validation import first_fault
from harness.errors import RuntimeOutputError

Floats = npt.NDArray[np.float32]
_Size = Annotated[int, Field(ge=0, le=1 << 32)]


class _Tensor(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    shape: tuple[_Size, ...]
    code: Annotated[str, Field(pattern=r"[bBhHiIfe]")]
    scale: float
    offset: int
    size: _Size


class _Head(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Annotated[int, Field(ge=1, le=1)]
    first: _Size
    tokens: _Size
    slots: _Size
    tensors: list[_Tensor]


@dataclass(frozen=True)
class StepTensors:
    """Tensors of the call that gave one token.

    Attributes:
        tokens: all that the model had seen, those of the call last.
        first: position of the first token of the call.
        slots: columns of the KV cache before those of the call.
        values: real numbers of each tensor, in the shape of the graph.
        changed: tensors that the container's own graphs give otherwise; None if these are they.
    """

    tokens: tuple[int, ...]
    first: int
    slots: int
    values: Mapping[str, Floats]
    changed: tuple[str, ...] | None = None

    def beside(self, plain: "StepTensors") -> "StepTensors":
        """Return these tensors, compared with those of the container's own graphs."""
        pairs = ((name, values, self.values.get(name)) for name, values in plain.values.items())
        same = self.tokens == plain.tokens
        differences = [
            name for name, a, b in pairs if not same or b is None or not np.array_equal(a, b)
        ]
        return dataclasses.replace(self, changed=tuple(differences))


def parse_dump(data: bytes, tokens: Sequence[int], device: str) -> StepTensors:
    """Read the runner's output of `--dump`.

    Args:
        tokens: prompt and answer, as the model saw them.
    """
    line, _, content = data.partition(b"\n")
    try:
        head = _Head.model_validate_json(line)
    except ValidationError as error:
        reason = f"unreadable dump: {first_fault(error, _Head)}"
        raise RuntimeOutputError(device, reason) from error
    if len(content) != sum(tensor.size for tensor in head.tensors):
        raise RuntimeOutputError(device, "the dump is not as long as its tensors")
    arrays, begin = {}, 0
    for tensor in head.tensors:
        integers = np.frombuffer(content[begin : begin + tensor.size], tensor.code)
        begin += tensor.size
        values = integers.reshape(tensor.shape).astype(np.float64)
        if tensor.scale:
            values = (values + tensor.offset) * tensor.scale
        arrays[tensor.name] = values.astype(np.float32)
    end = head.first + head.tokens
    return StepTensors(tuple(tokens[:end]), head.first, head.slots, arrays)
