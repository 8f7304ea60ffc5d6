"""`qnnfarm debug`: tensors of a call on a device beside those of the float model on this host.

Both are fed the same tokens, so a difference is one of the graphs: of quantization, of what the
compiler made of them, or of the device. `qnnfarm verify` compares their logits.
"""

import fnmatch
import math
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.text import Text

from buildlib.builder.model_folder import write_alike
from buildlib.builder.model_place import find_model
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.container.container import GenAIContainer
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
from harness.cli.arguments import CacheDir, ContainerDir, DeviceOptions, Json, with_groups
from harness.cli.device_lease import open_session
from harness.console import answers, print_json, print_remark, print_rows
from harness.errors import BAD, WrongUseError
from harness.runtimes.base import GenerationRequest
from harness.runtimes.registry import open_model
from plugins.diagnosis.graph_runtime import GraphRuntime
from plugins.diagnosis.graph_tensors import Floats, StepTensors
from plugins.diagnosis.inner_tensors import optimized_model

_BOUND_DB = 15.0
"""What rounding to 8 bits leaves of most tensors."""
if TYPE_CHECKING:
    from buildlib.numerics.runners import Arrays

app = typer.Typer(help="Diagnoses of tensors, call by call.", no_args_is_help=True)

Prompt = Annotated[str, typer.Option(help="Prompt of the query.")]


@app.command("tensor")
@with_groups
def tensor(
    container_dir: ContainerDir,
    reference: Annotated[
        str,
        typer.Option(
            metavar="CHECKPOINT_DIR",
            help="The checkpoint, as `build` takes it, which this host runs.",
        ),
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TENSOR",
            help="Values of the model, such as layer_0_scores or 'layer_0_*'; by default all that "
            "are outputs of graphs.",
            show_default=False,
        ),
    ] = None,
    *,
    prompt: Prompt = "In the beginning",
    step: Annotated[
        int, typer.Option(min=0, help="The call that gives token N of the answer; 0 is prefill.")
    ] = 0,
    bound: Annotated[float, typer.Option(metavar="DB", help="Least SQNR of a tensor.")] = _BOUND_DB,
    options: DeviceOptions,
    cache: CacheDir = None,
    json: Json = False,
) -> None:
    """Compare tensors of a step on a device with those of the model in float.

    The runtime graph answers the prompt, and the float model sees the same tokens. The first tensor
    that is below the bound is named, with its layer. Graphs with inner tensors are compiled again
    to have them as outputs; their other outputs are compared with those of the container.
    Exits 1 if a tensor is below the bound.

    Example: qnnfarm debug tensor CONTAINER_DIR --reference CHECKPOINT_DIR
    """
    model = open_model(container_dir, "graph")
    changed = optimized_model(GenAIContainer.load(container_dir), cache)
    shape = GraphShape(max(model.info.ars), model.info.cl)
    place = find_model(reference)
    float_model = FloatReference(place.folder, shape, changed)
    selection = float_model.select(names or ())
    request = GenerationRequest(step + 1, prompt=prompt)
    if selection:
        print_remark("graphs that do not give these tensors yet are compiled again")
    with open_session(model, options, command="debug tensor") as session:
        runtime = session.runtime
        assert isinstance(runtime, GraphRuntime)  # noqa: S101  (the model's)
        result, tensors = runtime.dump(request, step, selection, cache_root=cache)
    deviations = float_model.compare(tensors, selection, bound_db=bound)
    outside = [one for one in deviations if not one.holds]
    if json:
        print_json(
            {
                "text": result.text,
                "first": tensors.first,
                "tokens": len(tensors.tokens) - tensors.first,
                "tensors": [_finite(asdict(one)) for one in deviations],
                "first_outside": outside[0].name if outside else None,
                "changed": tensors.changed,
            }
        )
    else:
        _show_deviations(deviations, bound)
        for name in sorted(set(names or ()) & set(selection) - {one.name for one in deviations}):
            print_remark(f"{name} is no value of its own in the compiled graphs")
        if tensors.changed is not None:
            print_remark(_describe_change(tensors.changed))
    if outside:
        raise typer.Exit(BAD)


def _describe_change(changed: Sequence[str]) -> str:
    if not changed:
        return "the graphs with more outputs give all else bit by bit as the container's"
    return f"the graphs with more outputs give {', '.join(changed)} otherwise than the container's"


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    """Replace infinity, for which JSON has no number: equal tensors have an infinite SQNR."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _show_deviations(deviations: "Sequence[Deviation]", bound: float) -> None:
    console = answers()
    rows = []
    for one in deviations:
        layer = "" if one.layer is None else str(one.layer)
        cells = (one.name, layer, f"{one.sqnr_db:.1f}", f"{one.relative:.2%}")
        rows.append([Text(cell, "" if one.holds else "red") for cell in cells])
    print_rows(("tensor", "layer", "SQNR dB", "largest difference"), rows)
    worst = next((one for one in deviations if not one.holds), None)
    if worst is None:
        console.print(f"all within {bound:g} dB of the float model")
    else:
        where = "" if worst.layer is None else f", in layer {worst.layer}"
        console.print(f"the first below {bound:g} dB is {worst.name}{where}", style="red")


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
        changed: folder of the model that was quantized, as `optimized_model` gives
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
        self, step: StepTensors, names: Sequence[str] = (), *, bound_db: float = _BOUND_DB
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
    pairs = enumerate(zip(dims, other, strict=True))
    return next((axis for axis, (a, b) in pairs if a != b and axis != without), None)


def _layer(name: str) -> int | None:
    match = re.match(r"layer_(\d+)_", name)
    return int(match[1]) if match else interface.kv_layer(name)
