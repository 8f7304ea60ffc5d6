"""Tensors of a step on a device beside those of the float model on this host.

Both are fed the same tokens, so a difference is one of the graphs: of quantization, of what the
compiler made of them, or of the device.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import onnx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import load_config
from buildlib.graph import interface
from buildlib.graph.decoder import export_onnx
from buildlib.graph.files import load_proto
from buildlib.graph.shape import GraphShape
from buildlib.numerics.comparison import relative_difference
from buildlib.numerics.divergence import sqnr_db
from buildlib.numerics.host_loop import HostLoop, feed_window
from buildlib.numerics.runners import OnnxRunner
from buildlib.validation import first_fault
from harness.errors import RuntimeOutputError, WrongUseError

if TYPE_CHECKING:
    from buildlib.numerics.runners import Arrays

Floats = npt.NDArray[np.float32]
BOUND_DB = 15.0
"""Least SQNR of a tensor by default: what rounding to 8 bits leaves of most."""
_Size = Annotated[int, Field(ge=0, le=1 << 32)]


class _Tensor(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    shape: tuple[_Size, ...]
    code: Annotated[str, Field(pattern=r"[bBhHiIf]")]
    scale: float
    offset: int
    size: _Size


class _Head(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Annotated[int, Field(ge=1, le=1)]
    first: _Size
    tokens: _Size
    tensors: list[_Tensor]


@dataclass(frozen=True)
class StepTensors:
    """Tensors of the call that gave one token.

    Attributes:
        tokens: all that the model had seen, those of the call last.
        first: position of the first token of the call.
        rows: real numbers of each tensor, `[tokens of the call, ...]`.
    """

    tokens: tuple[int, ...]
    first: int
    rows: Mapping[str, Floats]


def parse_dump(data: bytes, tokens: Sequence[int], device: str) -> StepTensors:
    """Read what the runner wrote for `--dump`.

    Args:
        tokens: prompt and answer, as the model saw them.

    Raises:
        RuntimeOutputError: it is no such file.
    """
    line, _, content = data.partition(b"\n")
    try:
        head = _Head.model_validate_json(line)
    except ValidationError as error:
        reason = f"unreadable dump: {first_fault(error, _Head)}"
        raise RuntimeOutputError(device, reason, "") from error
    if len(content) != sum(tensor.size for tensor in head.tensors):
        raise RuntimeOutputError(device, "the dump is not as long as its tensors", "")
    rows, begin = {}, 0
    for tensor in head.tensors:
        stored = np.frombuffer(content[begin : begin + tensor.size], tensor.code)
        begin += tensor.size
        values = stored.reshape(tensor.shape).astype(np.float64)
        if tensor.scale:
            values = (values + tensor.offset) * tensor.scale
        by_token = np.moveaxis(values, _token_axis(tensor.name, len(tensor.shape)), 0)
        rows[tensor.name] = by_token[: head.tokens].astype(np.float32)
    seen = head.first + head.tokens
    return StepTensors(tuple(tokens[:seen]), head.first, rows)


def _token_axis(name: str, rank: int) -> int:
    if interface.is_kv(name):
        return interface.token_axis(name)
    return 2 if rank == 4 else 1


@dataclass(frozen=True)
class Deviation:
    """Distance of a tensor from the float model's.

    Attributes:
        layer: that makes it; None for a value between layers, and for logits.
        sqnr_db: 10 log10(sum(a^2) / sum((a - b)^2)), a being the float model's.
        relative: max|a - b| / max|a|.
        holds: whether the SQNR is within the bound.
    """

    name: str
    layer: int | None
    sqnr_db: float
    relative: float
    holds: bool


def compare_with_float(
    step: StepTensors, checkpoint: Path, shape: GraphShape, *, bound_db: float = BOUND_DB
) -> list[Deviation]:
    """Compare tensors with those of a checkpoint in float, in the order in which it makes them.

    Args:
        shape: AR and CL to run the float model at.

    Raises:
        BuildError: the folder holds no checkpoint that can be run.
        WrongUseError: the float model has no tensor of that name.
    """
    reference = _float_rows(step, checkpoint, shape)
    last = slice(step.first, len(step.tokens))
    deviations = []
    for name, rows in reference.items():
        ours, theirs = step.rows[name], rows[last]
        distance = sqnr_db(theirs, ours.reshape(theirs.shape))
        relative = relative_difference(theirs, ours.reshape(theirs.shape))
        layer = interface.kv_layer(name)
        deviations.append(Deviation(name, layer, distance, relative, distance >= bound_db))
    return deviations


def _float_rows(step: StepTensors, checkpoint: Path, shape: GraphShape) -> dict[str, Floats]:
    """Return the rows of all tokens so far, in the order of the float graph."""
    config = load_config(checkpoint / "config.json")
    calls: dict[str, list[Floats]] = {}

    def keep(outputs: "Arrays", count: int) -> None:
        for name, rows in calls.items():
            values: npt.NDArray[Any] = outputs[name]
            by_token = np.moveaxis(values, _token_axis(name, values.ndim), 0)
            rows.append(by_token[:count].astype(np.float32))

    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
        path = export_onnx(Checkpoint.load(checkpoint), shape, Path(folder))
        calls.update({name: [] for name in _expose(path, step.rows)})
        with HostLoop({shape.ar: [OnnxRunner(path)]}, config, on_outputs=keep) as loop:
            for _ in feed_window(loop, step.tokens):
                pass
    return {name: np.concatenate(rows) for name, rows in calls.items()}


def _expose(path: Path, wanted: Mapping[str, object]) -> Iterator[str]:
    """Make values of a graph its outputs, and yield their names in the order of its nodes."""
    model = load_proto(path)
    made = {name for node in model.graph.node for name in node.output}
    for name in wanted:
        if name not in made:
            raise WrongUseError(
                f"the float model has no tensor {name}: outputs of graphs can be compared"
            )
    known = {value.name for value in model.graph.output}
    shapes = {value.name: value for value in model.graph.value_info}
    added = [name for name in wanted if name not in known]
    for name in added:
        empty = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        model.graph.output.append(shapes.get(name, empty))
    if added:
        path.write_bytes(model.SerializeToString())
    yield from (name for node in model.graph.node for name in node.output if name in wanted)
