"""Quantization of the weights of linear layers one decoder layer after the other.

Text runs through each decoder layer twice: in float, and as a device will compute it so far, with
the weights that are quantized already. Of each weight a solver sees its inputs in both, and chooses
integers. Linear layers that read the same input (queries, keys, values) are solved together, and
those after them see what they now compute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.values import source_of, static_shape
from buildlib.quantize.bitwidths import WeightFormat
from buildlib.quantize.grids import ParameterUse
from buildlib.quantize.recipe import check_blocks, matrix_uses
from buildlib.quantize.structure import channel_axis, head_weights
from buildlib.quantize.techniques.arguments import GptqArguments
from buildlib.quantize.techniques.base import FloatModel
from buildlib.quantize.tensor_writer import TensorWriter, replace_constant
from buildlib.quantize.weight_grids import Weights, encode_steps
from buildlib.reference.runners import Arrays
from buildlib.reference.segment_loop import Hidden, SegmentLoop

if TYPE_CHECKING:
    from buildlib.encodings.model import Encoding

Matrix = npt.NDArray[Any]


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of linear layers over the calibration text, [tokens, in] each.

    Attributes:
        real: of the float model.
        seen: with the weights before quantized.
        damping_part: of the mean diagonal of the Hessian, which is added to it.
    """

    real: Matrix
    seen: Matrix
    damping_part: float = GptqArguments().damping

    @cached_property
    def hessian(self) -> Matrix:
        """Mean of `x x^T` over the inputs as seen, [in, in]: that of the squared output error."""
        return (self.seen.T @ self.seen) / len(self.seen)

    @cached_property
    def cross(self) -> Matrix:
        """Mean of `x_real x^T`, [in, in]."""
        return (self.real.T @ self.seen) / len(self.seen)

    @cached_property
    def damping(self) -> float:
        """Addition to the diagonal of the Hessian, so that it can be inverted."""
        return float(self.damping_part * self.hessian.diagonal().mean()) or 1.0

    @cached_property
    def inverse(self) -> Matrix:
        """Inverse of the damped Hessian, float64."""
        damped = self.hessian.astype(np.float64)
        damped[np.diag_indices_from(damped)] += self.damping
        inverse: Matrix = np.linalg.inv(damped)
        return (inverse + inverse.T) / 2


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
    """

    name: str
    solver: Solver
    damping: float = GptqArguments().damping

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
            work = _LayerWork(loop, file, self, model, uses)
            n_layers = loop.n_segments - 2
            real = seen = loop.run(0, None)
            for index in range(1, n_layers + 1):
                real, seen = work.quantize(index, real, seen)
                if progress is not None:
                    progress(index, n_layers)
            for name in uses:
                replace_constant(whole.graph, name, file.tensor(name))
        params = (*model.encodings.param_encodings, *work.encodings)
        encodings = model.encodings.model_copy(update={"param_encodings": params})
        return model.changed(save_model(whole, folder / MODEL_FILE), encodings)


def open_uses(graph: ir.Graph, model: FloatModel) -> dict[str, ParameterUse]:
    """Return the weights of matrices to quantize: without an encoding, and of one matrix only."""
    uses = matrix_uses(graph)
    model.bits.check_patterns({use.name for use in uses})
    given, heads = model.encodings.by_name(), head_weights(graph)
    return {
        use.name: use
        for use in uses
        if use.name not in given
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
    ) -> None:
        self.encodings: list[Encoding] = []
        self._loop = loop
        self._file = file
        self._technique = technique
        self._model = model
        self._uses = uses

    def quantize(
        self, index: int, real: Hidden | None, seen: Hidden | None
    ) -> tuple[Hidden | None, Hidden | None]:
        """Quantize the weights of a segment; return the borders after it, in float and as seen."""
        groups = self._groups(index)
        after_real, inputs_real = self._run(index, real, list(groups), ())
        done: list[str] = []
        for name, uses in groups.items():
            inputs = inputs_real.pop(name)
            shown = inputs if seen is real and not done else None
            if shown is None:
                shown = self._run(index, seen, [name], done)[1][name]
            layer = LayerInputs(inputs, shown, self._technique.damping)
            for use in uses:
                self._solve(use, layer)
                done.append(use.name)
        last = index == self._loop.n_segments - 2
        return after_real, None if last else self._run(index, seen, (), done)[0]

    def _groups(self, index: int) -> dict[str, list[ParameterUse]]:
        """Return the weights of a segment by the name of the input that they multiply."""
        groups: dict[str, list[ParameterUse]] = {}
        for node in self._loop.segment(index).graph:
            data, weight = (*node.inputs, None, None)[:2]
            name = "" if weight is None else str(source_of(weight).name)
            if data is not None and name in self._uses and channel_axis(node, 1) is not None:
                groups.setdefault(str(data.name), []).append(self._uses[name])
        return groups

    def _solve(self, use: ParameterUse, inputs: LayerInputs) -> None:
        assert use.source.const_value is not None  # noqa: S101  (an initializer)
        axis = channel_axis(use.node, use.index) or 0
        array = tensor_array(use.source.const_value).astype(np.float32)
        fmt = self._model.bits.weight_format(use.name)
        solution = self._technique.solver(array if axis == 0 else array.T, fmt, inputs)
        self.encodings.append(encode_steps(use.name, solution.steps, fmt, axis))
        self._file.write(use.name, solution.values if axis == 0 else solution.values.T)

    def _run(
        self, index: int, hidden: Hidden | None, names: Sequence[str], done: Sequence[str]
    ) -> tuple[Hidden | None, dict[str, Matrix]]:
        """Run a segment with the weights `done`; return the border after it, and values by name."""
        found: dict[str, list[Matrix]] = {name: [] for name in names}

        def see(outputs: Arrays, n_tokens: int) -> None:
            for name, parts in found.items():
                array = outputs[name]
                parts.append(array.reshape(-1, array.shape[-1])[:n_tokens])

        change = partial(self._change, names=names, done=done)
        after = self._loop.run(index, hidden, on_outputs=see, change=change)
        return after, {name: np.concatenate(parts) for name, parts in found.items()}

    def _change(self, model: ir.Model, names: Sequence[str], done: Sequence[str]) -> None:
        graph = model.graph
        for name in done:
            replace_constant(graph, name, self._file.tensor(name))
        values = {str(value.name): value for node in graph for value in node.outputs}
        shown = {str(value.name) for value in graph.outputs}
        graph.outputs.extend(values[name] for name in names if name not in shown)
