"""AdaScale: scales of weights, learned so that each decoder layer computes the same as in float.

AIMET's technique: a weight is divided by learned scales before it is rounded, one for each weight
(`s2`) and one for each output channel (`s3`), as in FlexRound (Lee et al. 2023), and the steps of
its grid are learned as well, in place of the clipping of OmniQuant (Shao et al. 2023), which comes
to the same for symmetric grids. Rounding passes gradients on (straight-through estimator). The loss
is the squared error of the layer's output, behind the quantized layers before it, against that of
the float model; Adam takes a step for each window of text.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.cancellation import check_cancelled
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.encodings.model import Encoding
from buildlib.graph import interface
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.values import static_shape
from buildlib.numerics.feeds import KvCache
from buildlib.numerics.runners import Port
from buildlib.numerics.segment_loop import Hidden, SegmentLoop
from buildlib.progress import tell
from buildlib.quantize.bitwidths import WeightFormat
from buildlib.quantize.grids import ParameterUse, channel_axis
from buildlib.quantize.recipe import check_blocks, weight_format
from buildlib.quantize.techniques.arguments import AdaScaleArguments
from buildlib.quantize.techniques.base import FloatModel
from buildlib.quantize.techniques.layerwise import open_uses, with_weights
from buildlib.quantize.tensor_writer import TensorWriter, replace_constant
from buildlib.quantize.weight_grids import Weights, encode_steps, fit_steps, round_to, stored_steps
from plugins.techniques.gradients import Differentiable

Array = npt.NDArray[Any]
_THREADED_WEIGHTS = 1 << 22
_BETAS, _EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class AdaScale:
    """`WeightTechnique` that learns the scales of one decoder layer after the other."""

    name: str
    arguments: AdaScaleArguments

    def optimize(
        self, model: FloatModel, folder: Path, progress: Callable[[int, int], None] | None = None
    ) -> FloatModel:
        """Write the model with its weights on their grids, and return it with their encodings."""
        whole = load_model(model.path)
        uses = open_uses(whole.graph, model)
        check_blocks(uses.values(), (), model.bits)
        shapes = {name: static_shape(use.source) or () for name, use in uses.items()}
        encodings: list[Encoding] = []
        if not uses:
            return model.changed(save_model(whole, folder / MODEL_FILE), model.encodings)
        with (
            TensorWriter(folder / f"{self.name}.safetensors", shapes) as file,
            SegmentLoop(model.path, model.config, model.token_windows) as loop,
        ):
            n_layers = loop.n_segments - 2
            real = seen = loop.run(0, None)
            for index in range(1, n_layers + 1):
                layer = _Layer(loop, index, uses, model)
                after = loop.run(index, real)
                if layer.weights and seen is not None and after is not None:
                    with layer.limited_threads():
                        layer.learn(seen, after, self.arguments)
                for name, weight in layer.weights.items():
                    file.write(name, weight.stored(weight.rounded()))
                    encodings.append(weight.encoding())
                real, seen = after, loop.run(index, seen, change=_weights_of(layer, file))
                if progress is not None:
                    progress(index, n_layers)
        return with_weights(model, whole, file, encodings, folder)


def _weights_of(layer: "_Layer", file: TensorWriter) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        for name in layer.weights:
            replace_constant(model.graph, name, file.tensor(name))

    return change


class _LearnedWeight:
    """A weight, and the scales that decide how it is rounded.

    Attributes:
        parameters: logarithms of the scales of weights `s2` and of channels `s3`, and of the change
            of the steps. The steps of LPBQ, multiples of one of their channel, stay as they are.
    """

    def __init__(self, use: ParameterUse, fmt: WeightFormat) -> None:
        assert use.source.const_value is not None  # noqa: S101  (an initializer)
        self._name, self._fmt = use.name, fmt
        self._axis = channel_axis(use.node, use.index) or 0
        array = tensor_array(use.source.const_value).astype(np.float32)
        self._weights = np.ascontiguousarray(array if self._axis == 0 else array.T)
        self._steps = fit_steps(self._weights, fmt, np.ones(self._weights.shape[1]))
        rows = (len(self._weights), 1)
        self.parameters = {
            "s2": np.zeros_like(self._weights),
            "s3": np.zeros(rows, np.float32),
            "step": np.zeros(rows, np.float32),
        }

    def stored(self, values: Weights) -> Weights:
        """Return weights [out, in] as the model has them."""
        return values if self._axis == 0 else values.T

    def rounded(self) -> Weights:
        """Return the weight on its grid, [out, in]."""
        return round_to(*self._scaled(), self._fmt.bits)

    def encoding(self) -> Encoding:
        """Return the encoding that says the grid."""
        return encode_steps(self._name, self._current_steps(), self._fmt, self._axis)

    def gradients(self, grad: Array) -> dict[str, Array]:
        """Return the gradients of the parameters, by that of the weight as the model has it."""
        grad = grad if self._axis == 0 else grad.T
        values, steps = self._scaled()
        half = 1 << (self._fmt.bits - 1)
        unsaturated = np.where(np.abs(values / steps + 0.5) < half, values, 0)  # the rest saturates
        by_scale = -grad * unsaturated
        gradients = {"s2": by_scale, "s3": by_scale.sum(axis=1, keepdims=True)}
        if self._fmt.block_size is None:
            error = grad * (round_to(values, steps, self._fmt.bits) - unsaturated)
            gradients["step"] = error.sum(axis=1, keepdims=True)
        return gradients

    def _current_steps(self) -> npt.NDArray[np.float64]:
        steps: npt.NDArray[np.float64] = self._steps * np.exp(self.parameters["step"])
        return steps

    def _scaled(self) -> tuple[Weights, Weights]:
        """Return the weight divided by its scales, and the step of each of its values."""
        values = self._weights * np.exp(-(self.parameters["s2"] + self.parameters["s3"]))
        return values, stored_steps(self._current_steps(), self._fmt, self._weights.shape[1])


class _Layer:
    """A decoder layer with learned scales."""

    def __init__(
        self, loop: SegmentLoop, index: int, uses: Mapping[str, ParameterUse], model: FloatModel
    ) -> None:
        graph = loop.segment(index).graph
        names = [str(value.name) for value in graph.initializers.values() if value.name in uses]
        self.weights = {
            name: _LearnedWeight(uses[name], weight_format(uses[name], model.bits))
            for name in names
        }
        self._loop = loop
        self._graph = Differentiable(graph, names)
        self._ports = [
            Port(str(value.name), np.dtype(np.float32), static_shape(value) or ())
            for value in graph.inputs
        ]
        self._before = next(
            port.name
            for port in self._ports
            if not interface.is_kv(port.name) and port.name not in loop.inputs_at(0, [0])
        )
        self._after = next(
            str(value.name) for value in graph.outputs if not interface.is_kv(str(value.name))
        )

    def limited_threads(self) -> AbstractContextManager[object]:
        """Keep the products of a small layer on one thread: on two they take ten times as long.

        That is where other processes want the cores: OpenBLAS waits by spinning.
        """
        from threadpoolctl import threadpool_limits

        n_weights = sum(weight.parameters["s2"].size for weight in self.weights.values())
        limits: AbstractContextManager[object] = threadpool_limits(
            1 if n_weights < _THREADED_WEIGHTS else None
        )
        return limits

    def learn(self, seen: Hidden, after: Hidden, arguments: AdaScaleArguments) -> None:
        """Learn the scales that bring the layer's output near that of the float model.

        Args:
            seen: border before the layer, as the quantized layers before it make it.
            after: border after the layer, of the float model.
        """
        random = np.random.default_rng(arguments.seed)
        optimizers = {
            (name, key): _Adam(values, arguments.learning_rate)
            for name, weight in self.weights.items()
            for key, values in weight.parameters.items()
        }
        calls = [len(window) // self._loop.shape.ar for window in self._loop.windows]
        starts = np.cumsum([0, *calls])
        order: list[int] = []
        for step in range(arguments.num_iterations):
            check_cancelled()
            tell(f"{self._loop.place}, step {step + 1}/{arguments.num_iterations}")
            order = order or list(random.permutation(len(self._loop.windows)))
            number = order.pop()
            first = int(starts[number])
            grads = self._gradients(self._loop.windows[number], seen[first:], after[first:])
            decay = 1 - step / arguments.num_iterations
            for name, weight in self.weights.items():
                for key, grad in weight.gradients(grads[name]).items():
                    optimizers[name, key].step(grad, decay)

    def _gradients(self, window: Sequence[int], seen: Hidden, after: Hidden) -> dict[str, Array]:
        """Return the gradients of the weights over a window, call by call; caches pass none on."""
        weights = {name: weight.stored(weight.rounded()) for name, weight in self.weights.items()}
        cache = KvCache(self._ports, self._loop.shape.cl)
        ar = self._loop.shape.ar
        gradients: dict[str, Array] = {}
        for call, start in enumerate(range(0, len(window), ar)):
            tokens = window[start : start + ar]
            feeds = self._loop.inputs_at(cache.n_past, tokens) | cache.past(self._loop.shape.past)
            feeds[self._before] = seen[call]
            values = self._graph.forward(feeds, weights)
            cache.append(values, len(tokens))
            error = values[self._after] - after[call]
            for name, grad in self._graph.backward(values, self._after, error).items():
                gradients[name] = gradients[name] + grad if name in gradients else grad
        return gradients


class _Adam:
    """Adam (Kingma and Ba, 2014) of one array of parameters, which it changes in place."""

    def __init__(self, values: Weights, rate: float) -> None:
        self._values, self._rate, self._steps = values, rate, 0
        self._mean, self._square = np.zeros_like(values), np.zeros_like(values)

    def step(self, grad: Array, decay: float) -> None:
        """Take a step against a gradient, at a part of the learning rate."""
        self._steps += 1
        self._mean += (1 - _BETAS[0]) * (grad - self._mean)
        self._square += (1 - _BETAS[1]) * (grad * grad - self._square)
        rate = self._rate * decay / (1 - _BETAS[0] ** self._steps)
        root = np.sqrt(self._square / (1 - _BETAS[1] ** self._steps)) + _EPSILON
        self._values -= rate * self._mean / root
