"""Tensors of a step on a device beside those of the float model on this host.

Both are fed the same tokens, so a difference is one of the graphs: of quantization, of what the
compiler made of them, or of the device.
"""

import dataclasses
import fnmatch
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buildlib.builder.model_folder import write_alike
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.error_base import nearest_names
from buildlib.graph import interface
from buildlib.graph.decoder import build_decoder
from buildlib.graph.files import save_model
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import infer_shapes, static_shape
from buildlib.numerics.comparison import relative_difference
from buildlib.numerics.divergence import sqnr_db
from buildlib.numerics.host_loop import HostLoop, feed_window
from buildlib.numerics.runners import OnnxRunner
from buildlib.passes.mha2sha import whole_name
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


class FloatReference:
    """A checkpoint in float on this host, with access to each of its values.

    Args:
        changed: folder of the model that was quantized, as `buildlib.replay.optimized_model` gives
            it: values between weights that changed with it are those of the container.
    """

    def __init__(self, checkpoint: Path, shape: GraphShape, changed: Path | None = None) -> None:
        self._changed = changed
        self._checkpoint = Checkpoint.load(checkpoint)
        self._shape = shape
        self._axes = _find_axes(self._checkpoint, shape.cl)

    def select(self, patterns: Sequence[str]) -> list[str]:
        """Return the names that one of the patterns matches, as file names match."""
        for pattern in patterns:
            if not fnmatch.filter(self._axes, pattern):
                near = nearest_names(pattern, self._axes, 3)
                hint = f": did you mean {' or '.join(near)}?" if near else ""
                raise WrongUseError(f"the float model has no tensor {pattern}{hint}")
        return [name for name in self._axes if any(fnmatch.fnmatchcase(name, p) for p in patterns)]

    def compare(
        self, step: StepTensors, names: Sequence[str] = (), *, bound_db: float = BOUND_DB
    ) -> list[Deviation]:
        """Compare tensors of a step, in the order in which the float model makes them.

        Args:
            names: of those to compare; none for all that both have.
        """
        selection = self._axes.keys() & set(names or self._axes)
        pieces: dict[str, dict[int, Floats]] = {}
        for name, values in step.values.items():
            whole, place = (name, None) if name in self._axes else whole_name(name)
            if whole in selection:
                pieces.setdefault(whole, {})[place or 0] = values
        last = slice(step.first, len(step.tokens))
        deviations = []
        for name, rows in self.rows(step.tokens, pieces).items():
            theirs = rows[last]
            ours = self._join(name, pieces[name], step).reshape(theirs.shape)
            distance, relative = sqnr_db(theirs, ours), relative_difference(theirs, ours)
            deviations.append(
                Deviation(name, _layer(name), distance, relative, distance >= bound_db)
            )
        return deviations

    def _join(self, name: str, pieces: Mapping[int, Floats], step: StepTensors) -> Floats:
        """Return the rows of the call's tokens, heads or columns side by side."""
        count = len(step.tokens) - step.first
        rows = [
            self._axes[name].rows(pieces[place], step.first, count, step.slots, len(step.tokens))
            for place in sorted(pieces)
        ]
        return np.concatenate(rows, axis=-1 if rows[0].ndim < _RANK_OF_HEADS else 1)

    def rows(self, tokens: Sequence[int], wanted: Collection[str]) -> dict[str, Floats]:
        """Return a row of values for each token, `[tokens, ...]`, in the order of the graph."""
        shape = self._shape
        calls: dict[str, list[Floats]] = {name: [] for name in self._axes if name in wanted}
        first = 0

        def keep(outputs: "Arrays", count: int) -> None:
            nonlocal first
            for name, rows in calls.items():
                values: npt.NDArray[Any] = outputs[name]
                axes = self._axes[name]
                own_rows = axes.rows(values, first, count, shape.past, len(tokens))
                rows.append(own_rows.astype(np.float32))
            first += count

        with tempfile.TemporaryDirectory(prefix="qnnfarm-") as folder:
            model = build_decoder(self._checkpoint, shape)
            infer_shapes(model)
            own = set(model.graph.outputs)
            inner_values = (value for node in model.graph for value in node.outputs)
            model.graph.outputs.extend(v for v in inner_values if v.name in calls and v not in own)
            path = save_model(model, Path(folder) / MODEL_FILE)
            if self._changed is not None:
                alike = Path(folder) / "alike"
                alike.mkdir()
                path = write_alike(path, self._changed, alike)
            config = self._checkpoint.config
            with HostLoop({shape.ar: [OnnxRunner(path)]}, config, on_outputs=keep) as loop:
                for _ in feed_window(loop, tokens):
                    pass
        return {name: np.concatenate(rows) for name, rows in calls.items()}


_RANK_OF_HEADS = 4


@dataclass(frozen=True)
class _Axes:
    """Axes of a value that count the tokens of a call, and the columns that they attend to."""

    tokens: int | None
    columns: int | None

    def rows(self, values: Floats, first: int, count: int, slots: int, seen: int) -> Floats:
        """Return `[count, ...]`, a row for each token of a call.

        Of what has columns as well, those are in the order of the context, as many as `seen`, and 0
        where a token does not look. What has columns alone has those of the call.

        Args:
            slots: columns before those of the call.
        """
        if self.columns is None:
            return np.moveaxis(values, self.tokens or 0, 0)[:count]
        own = range(slots, slots + count)
        if self.tokens is None:
            return np.moveaxis(np.take(values, own, self.columns), self.columns, 0)
        by_column = np.moveaxis(values, (self.tokens, self.columns), (0, 1))[:count]
        rows = np.zeros((count, seen, *by_column.shape[2:]), np.float32)
        rows[:, : first + count] = by_column[:, [*range(first), *own]]
        for row in range(count):
            rows[row, first + row + 1 :] = 0.0
        return np.moveaxis(rows, 1, -1)


def _find_axes(checkpoint: Checkpoint, cl: int) -> dict[str, _Axes]:
    """Return the axes of all values, in the order of the graph: those whose size AR or CL changes.

    Values that depend on neither have no rows.
    """
    ar = next((number for number in range(2, cl) if cl % number == 0), cl)
    one, longer, more = (
        _value_shapes(checkpoint, shape)
        for shape in (GraphShape(1, cl - 1), GraphShape(1, cl), GraphShape(ar, cl))
    )
    axes = {}
    for name, dims in more.items():
        tokens = _difference(dims, longer.get(name, dims))
        columns = _difference(dims, one.get(name, dims), without=tokens)
        if tokens is not None or columns is not None:
            axes[name] = _Axes(tokens, columns)
    return axes


def _value_shapes(checkpoint: Checkpoint, shape: GraphShape) -> dict[str, tuple[int, ...]]:
    model = build_decoder(checkpoint, shape)
    infer_shapes(model)
    values = (value for node in model.graph for value in node.outputs)
    return {str(value.name): static_shape(value) or () for value in values}


def _difference(
    dims: Sequence[int], other: Sequence[int], *, without: int | None = None
) -> int | None:
    """Return the axis that differs in size."""
    pairs = enumerate(zip(dims, other, strict=True))
    return next((axis for axis, (a, b) in pairs if a != b and axis != without), None)


def _layer(name: str) -> int | None:
    match = re.match(r"layer_(\d+)_", name)
    return int(match[1]) if match else interface.kv_layer(name)
