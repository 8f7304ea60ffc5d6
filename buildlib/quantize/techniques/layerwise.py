"""Quantization of the weights of linear layers one decoder layer after the other.

Text runs through each decoder layer twice: in float, and as a device will compute it so far, with
the weights that are quantized already. Of each weight a solver sees its inputs in both, and chooses
integers. Linear layers that read the same input (queries, keys, values) share all that follows from
it, and those after them see its new outputs: the second run goes from one such input to the next.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.errors import BuildError
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.values import source_of, static_shape
from buildlib.numerics.runners import Arrays
from buildlib.numerics.segment_loop import Hidden, SegmentLoop
from buildlib.passes.steps import cut_into_steps
from buildlib.quantize.bitwidths import WeightFormat
from buildlib.quantize.calibration import Range, RangeObserver
from buildlib.quantize.grids import ParameterUse, channel_axis, head_weights
from buildlib.quantize.recipe import check_blocks, matrix_uses, weight_format
from buildlib.quantize.techniques.base import FloatModel
from buildlib.quantize.tensor_writer import TensorWriter, replace_constant
from buildlib.quantize.weight_grids import Weights, encode_steps

if TYPE_CHECKING:
    from buildlib.encodings.model import Encoding

Matrix = npt.NDArray[Any]
_LEAST_DAMPING = 0.01


@dataclass(frozen=True)
class Factor:
    """Cholesky factor of the damped Hessian of inputs in some order.

    Attributes:
        order: of the inputs.
        lower: `L` with `L L^T` the Hessian, [in, in]; values above its diagonal mean nothing.
    """

    order: npt.NDArray[np.intp]
    lower: Matrix

    def solve(self, rows: Matrix) -> Matrix:
        """Return `rows L^-T` for rows [any, in] in order; it may use their memory."""
        from scipy.linalg import blas  # lazily: it takes its time

        trsm = blas.strsm if self.lower.dtype == np.float32 else blas.dtrsm
        solved: Matrix = trsm(1.0, self.lower, rows.T, lower=1, overwrite_b=1)
        return solved.T


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of linear layers over the calibration text, [tokens, in] each.

    Attributes:
        real: of the float model.
        seen: with the weights before quantized.
        damping_part: of the mean diagonal of the Hessian, which is added to it; by default that of
            `default_damping`.
        n_outputs: of all the layers that read them; decides time alone.
    """

    real: Matrix
    seen: Matrix
    damping_part: float | None = None
    n_outputs: int = 0
    _factors: dict[bool, Factor] = field(default_factory=dict, repr=False, compare=False)
    _drifts: dict[bool, Matrix] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def hessian(self) -> Matrix:
        """Mean of `x x^T` over the inputs as seen, [in, in]: that of the squared output error."""
        sums: Matrix = self.seen.T @ self.seen
        sums /= len(self.seen)
        return sums

    @cached_property
    def cross(self) -> Matrix:
        """Mean of `x_real x^T`, [in, in]."""
        return (self.real.T @ self.seen) / len(self.seen)

    @cached_property
    def sizes(self) -> Matrix:
        """Mean square of each input as seen, the diagonal of the Hessian."""
        sums: Matrix = np.einsum("ti,ti->i", self.seen, self.seen)
        return sums / len(self.seen)

    @cached_property
    def damping(self) -> float:
        """Addition to the diagonal of the Hessian, so that it can be inverted."""
        part = self.damping_part or default_damping(*self.seen.shape)
        return float(part * self.sizes.mean()) or 1.0

    def factor(self, *, by_size: bool) -> Factor:
        """Return the Cholesky factor of the damped Hessian.

        In float32, as the Hessian is, if rounding leaves it positive definite.

        Args:
            by_size: order inputs by rising mean square.
        """
        if by_size not in self._factors:
            order = np.arange(self.seen.shape[1])
            if by_size:
                order = np.argsort(-self.sizes, kind="stable")[::-1]
            self._factors[by_size] = Factor(order, self._lower(order))
        return self._factors[by_size]

    def _lower(self, order: npt.NDArray[np.intp]) -> Matrix:
        from scipy.linalg import blas, lapack  # lazily: they take their time

        inputs = np.take(self.seen, order, axis=1).T
        for dtype, potrf in ((np.float32, lapack.spotrf), (np.float64, lapack.dpotrf)):
            damped: Matrix = blas.ssyrk(1 / len(self.seen), inputs, lower=1).astype(
                dtype, copy=False
            )
            np.einsum("ii->i", damped)[:] += self.damping
            lower, failed = potrf(damped, lower=1, clean=0, overwrite_a=1)
            if not failed and np.isfinite(lower.diagonal()).all():
                found: Matrix = lower
                return found
        raise BuildError("cannot calibrate: the inputs of a layer are not finite")

    def missed(self, weights: Weights, *, by_size: bool) -> Matrix:
        """Return the mean of `y x^T` times `L^-T`, [out, in] in the order of the factor.

        `y` is the difference of the float outputs from those on the inputs as seen.
        """
        factor, behind = self.factor(by_size=by_size), self.real - self.seen
        if self.n_outputs < len(factor.order):  # fewer products by way of the tokens
            return self._correlated(behind @ weights.T, factor)
        if by_size not in self._drifts:
            self._drifts[by_size] = self._correlated(behind, factor)
        product: Matrix = weights @ self._drifts[by_size]
        return product

    def _correlated(self, values: Matrix, factor: Factor) -> Matrix:
        """Return the mean of `v x^T` times `L^-T`, for values `v` of [tokens, any]."""
        means = values.T @ self.seen
        means /= len(self.seen)
        return factor.solve(np.take(means, factor.order, axis=1))


def default_damping(n_tokens: int, width: int) -> float:
    """Return the addition to a Hessian, as a part of its mean diagonal.

    GPTQ's 1 % suits many more tokens than inputs. With few, the Hessian takes directions that the
    text did not show for ones that do not matter, and errors gather there.
    """
    return max(_LEAST_DAMPING, width / n_tokens)


@dataclass(frozen=True)
class Solution:
    """A weight on its grid.

    Attributes:
        values: [out, in], integers times steps.
        steps: [out, blocks].
    """

    values: Weights
    steps: Matrix


class Solver(Protocol):
    """Chooses grid and integers of one weight."""

    def __call__(self, weights: Weights, fmt: WeightFormat, inputs: LayerInputs) -> Solution:
        """Return the weight [out, in] on a grid of the format."""
        ...


@dataclass(frozen=True)
class LayerwiseTechnique:
    """`WeightTechnique` that solves one weight after the other, in the order of the data flow.

    Attributes:
        damping: of the Hessians that its solver sees, as a part of their mean diagonal.
        float_text: text runs in float too from so many tokens on for each input of the widest
            layer; with fewer, a solver sees the same inputs as real ones.
    """

    name: str
    solver: Solver
    damping: float | None = None
    float_text: float = 0.0

    def optimize(
        self, model: FloatModel, folder: Path, progress: Callable[[int, int], None] | None = None
    ) -> FloatModel:
        """Write the model with its weights on their grids, and return it with their encodings."""
        whole = load_model(model.path)
        uses = open_uses(whole.graph, model)
        check_blocks(uses.values(), (), model.bits)
        if not uses:
            return model.changed(save_model(whole, folder / MODEL_FILE), model.encodings)
        shapes = {name: static_shape(use.source) or () for name, use in uses.items()}
        with (
            TensorWriter(folder / f"{self.name}.safetensors", shapes) as file,
            SegmentLoop(model.path, model.config, model.token_windows) as loop,
        ):
            widest = max(math.prod(shapes[name]) // _n_channels(use) for name, use in uses.items())
            n_tokens = sum(len(window) for window in loop.windows)
            in_float = n_tokens >= self.float_text * widest
            work = _LayerWork(loop, file, self, model, uses, in_float=in_float)
            n_layers = loop.n_segments - 2
            real = seen = work.embed()
            for index in range(1, n_layers + 1):
                real, seen = work.quantize(index, real, seen)
                if progress is not None:
                    progress(index, n_layers)
            ranges = work.ranges(seen) if model.n_calibrating else None
        new_model = with_weights(model, whole, file, work.encodings, folder)
        return replace(new_model, ranges=ranges)


def with_weights(
    model: FloatModel,
    whole: ir.Model,
    file: TensorWriter,
    encodings: "Sequence[Encoding]",
    folder: Path,
) -> FloatModel:
    """Write a model with new weights from a file; all others stay as they are.

    Args:
        whole: its graph, changed in place.
        file: of the new weights, in `folder`.
    """
    for encoding in encodings:
        replace_constant(whole.graph, encoding.name, file.tensor(encoding.name))
    params = (*model.encodings.param_encodings, *encodings)
    new_encodings = model.encodings.model_copy(update={"param_encodings": params})
    return model.changed(save_model(whole, folder / MODEL_FILE), new_encodings)


def open_uses(graph: ir.Graph, model: FloatModel) -> dict[str, ParameterUse]:
    """Return the weights of matrices to quantize: without an encoding, and of one matrix only."""
    uses = matrix_uses(graph)
    model.bits.check_patterns({use.name for use in uses})
    encodings, heads = model.encodings.by_name(), head_weights(graph)
    return {
        use.name: use
        for use in uses
        if use.name not in encodings
        and use.name not in heads
        and len(static_shape(use.source) or ()) == 2
        and use.node.op_type != "Conv"
        and len(_users(use.source)) == 1
    }


def _users(source: ir.Value) -> list[ir.Node]:
    nodes = [node for node, _ in source.uses()]
    return [
        user
        for node in nodes
        for user in (_users(node.outputs[0]) if node.op_type == "Cast" else [node])
    ]


class _LayerWork:
    """Quantizes the layers of a model, in their order."""

    def __init__(
        self,
        loop: SegmentLoop,
        file: TensorWriter,
        technique: LayerwiseTechnique,
        model: FloatModel,
        uses: Mapping[str, ParameterUse],
        *,
        in_float: bool,
    ) -> None:
        self.encodings: list[Encoding] = []
        self._loop = loop
        self._file = file
        self._technique = technique
        self._model = model
        self._uses = uses
        self._runs_in_float = in_float
        self._done: set[str] = set()
        self._observed = RangeObserver()
        calibrating = loop.windows[: model.n_calibrating]
        self._n_observed = sum(map(len, calibrating)) // loop.shape.ar

    def embed(self) -> Hidden:
        """Return the outputs of the embedding for all windows."""
        hidden = self._loop.run(0, None, **self._observing())
        self._observed.narrow()
        assert hidden is not None  # noqa: S101  (only the head has no border after it)
        return hidden

    def ranges(self, seen: Hidden) -> Mapping[str, Range]:
        """Return the ranges over the windows that calibrate, given the border before the head."""
        windows = self._loop.windows[: self._model.n_calibrating]
        with SegmentLoop(self._model.path, self._model.config, windows) as loop:
            head = seen[: self._n_observed]
            loop.run(loop.n_segments - 1, head, **self._observing())
        self._observed.narrow()
        return self._observed.ranges()

    def _observing(self) -> dict[str, Any]:
        """Return arguments of a run through the loop that observe the calls that calibrate."""
        calls = itertools.count()

        def observe(outputs: Arrays, n_tokens: int) -> None:
            if next(calls) < self._n_observed:
                self._observed.observe(outputs, n_tokens)

        if not self._n_observed:
            return {}
        return {"on_outputs": observe, "change": self._observed.add_outputs}

    def quantize(self, index: int, real: Hidden, seen: Hidden) -> tuple[Hidden, Hidden]:
        """Quantize the weights of a segment; return the borders after it, in float and as seen."""
        segment = self._loop.segment(index)
        groups = self._groups(segment)
        before, after = self._loop.borders(index)
        in_float = {}
        if self._runs_in_float:
            in_float = self._in_float(index, list(groups), {str(before): real})
        steps = cut_into_steps(segment, list(groups))
        values = {str(before): seen}
        for number, (name, uses) in enumerate(groups.items()):
            values = self._advance(steps[number:], values)
            rows = _rows(values[name])
            same = not self._runs_in_float or (seen is real and number == 0)
            inputs = rows if same else _rows(in_float.pop(name))
            n_outputs = sum(_n_channels(use) for use in uses)
            layer = LayerInputs(inputs, rows, self._technique.damping, n_outputs)
            for use in uses:
                self._solve(use, layer)
        if index == self._loop.n_segments - 2 and not self._n_observed:
            return real, seen  # nobody reads what follows
        seen = self._advance(steps[-1:], values)[str(after)]
        return in_float.get(str(after), seen), seen

    def _groups(self, segment: ir.Model) -> dict[str, list[ParameterUse]]:
        """Return the weights of a segment by the name of the input that they multiply."""
        groups: dict[str, list[ParameterUse]] = {}
        for node in segment.graph:
            data, weight = (*node.inputs, None, None)[:2]
            name = "" if weight is None else str(source_of(weight).name)
            if data is not None and name in self._uses and channel_axis(node, 1) is not None:
                groups.setdefault(str(data.name), []).append(self._uses[name])
        return groups

    def _in_float(
        self, index: int, names: Sequence[str], hidden: Mapping[str, Hidden]
    ) -> dict[str, Hidden]:
        """Return the given values, those of the names, and the border after the segment."""
        model = self._loop.segment(index)
        values = {str(value.name): value for node in model.graph for value in node.outputs}
        output_names = {str(value.name) for value in model.graph.outputs}
        new_outputs = [
            values[name] for name in names if name in values and name not in output_names
        ]
        model.graph.outputs.extend(new_outputs)
        return {**hidden, **self._loop.run_step(model, hidden)}

    def _advance(
        self, steps: Sequence[ir.Model], values: Mapping[str, Hidden]
    ) -> dict[str, Hidden]:
        """Run the first step with the weights so far; return the values that later ones read."""
        first, *rest = steps
        for name in self._done & set(first.graph.initializers):
            replace_constant(first.graph, name, self._file.tensor(name))
        outputs = {}
        if len(first.graph):
            outputs = self._loop.run_step(first, values, **self._observing())
            self._observed.narrow()
        needed_names = {str(value.name) for step in rest for value in step.graph.inputs}
        return {name: value for name, value in values.items() if name in needed_names} | outputs

    def _solve(self, use: ParameterUse, inputs: LayerInputs) -> None:
        assert use.source.const_value is not None  # noqa: S101  (an initializer)
        axis = channel_axis(use.node, use.index) or 0
        array = np.array(tensor_array(use.source.const_value), np.float32)
        fmt = weight_format(use, self._model.bits)
        solution = self._technique.solver(array if axis == 0 else array.T, fmt, inputs)
        self.encodings.append(encode_steps(use.name, solution.steps, fmt, axis))
        self._file.write(use.name, solution.values if axis == 0 else solution.values.T)
        self._done.add(use.name)


def _n_channels(use: ParameterUse) -> int:
    return (static_shape(use.source) or (0, 0))[channel_axis(use.node, use.index) or 0]


def _rows(values: Hidden) -> Matrix:
    """Return a value of all calls as [tokens, width]."""
    return values.reshape(-1, values.shape[-1])
