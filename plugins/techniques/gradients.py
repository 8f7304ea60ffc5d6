"""Reverse-mode gradients of a decoder layer in numpy, operator by operator.

Operators are those of layers in canonical form. Those of masks (CumSum, Less, Where), which nothing
learned reaches, have no gradient.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.errors import InvalidOptionError
from buildlib.graph.files import tensor_array

Array = npt.NDArray[Any]
Arrays = Sequence[Array]
Grads = Sequence[Array | None]
_Forward = Callable[[ir.Node, Arrays], Arrays]
_Backward = Callable[[ir.Node, Arrays, Arrays, Arrays], Grads]


class Differentiable:
    """A graph to run forwards, and backwards from one of its values.

    Args:
        graph: of float values; its constants are read once.
        learned: names of the constants to return gradients of.
    """

    def __init__(self, graph: ir.Graph, learned: Collection[str]) -> None:
        self._nodes = list(graph)
        self._learned = set(learned)
        self._constants = {
            str(value.name): _plain(tensor_array(value.const_value))
            for value in graph.initializers.values()
            if value.const_value is not None and value.name not in self._learned
        }
        self._active = set(self._learned)
        for node in self._nodes:
            learns = not self._active.isdisjoint(_inputs(node))
            if node.op_type not in _FORWARD or (learns and node.op_type not in _BACKWARD):
                reason = f"adascale cannot be used: no gradient of {node.op_type} ({node.name})"
                raise InvalidOptionError("quantization.techniques", reason, ())
            if learns:
                self._active |= {str(value.name) for value in node.outputs}

    def forward(self, feeds: Mapping[str, Array], weights: Mapping[str, Array]) -> dict[str, Array]:
        """Return all values by name."""
        values: dict[str, Array] = {**self._constants, **feeds, **weights}
        for node in self._nodes:
            results = _FORWARD[node.op_type](node, [values[name] for name in _inputs(node)])
            values |= zip((str(value.name) for value in node.outputs), results, strict=True)
        return values

    def backward(self, values: Mapping[str, Array], name: str, grad: Array) -> dict[str, Array]:
        """Return the gradients of the learned constants.

        Args:
            values: all, of `forward`.
            name: of the value that the gradient is of.
            grad: of the loss by this value.
        """
        grads = {name: grad}
        for node in reversed(self._nodes):
            outputs = [str(value.name) for value in node.outputs]
            if not any(output in grads for output in outputs):
                continue
            names = _inputs(node)
            results = [values[output] for output in outputs]
            above = [
                grads.pop(output) if output in grads else np.zeros_like(result)
                for output, result in zip(outputs, results, strict=True)
            ]
            inputs = [values[each] for each in names]
            below = _BACKWARD[node.op_type](node, inputs, results, above)
            for each, gradient in zip(names, below, strict=False):  # shapes and the like have none
                if gradient is not None and each in self._active:
                    grads[each] = grads[each] + gradient if each in grads else gradient
        return grads


def _inputs(node: ir.Node) -> list[str]:
    return [str(value.name) for value in node.inputs if value is not None]


def _plain(array: Array) -> Array:
    return array if array.dtype.kind in "iub" else array.astype(np.float32)


def _axis(node: ir.Node) -> int:
    return node.attributes.get_int("axis", -1 if node.op_type == "Softmax" else 0)


def _summed(grad: Array, shape: tuple[int, ...]) -> Array:
    """Return a gradient summed over the axes along which its value was repeated."""
    grad = grad.sum(axis=tuple(range(grad.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 != grad.shape[axis])
    return grad.sum(axis=axes, keepdims=True) if axes else grad


def _turned(array: Array) -> Array:
    return array.swapaxes(-1, -2)


def _gemm(node: ir.Node, inputs: Arrays) -> Arrays:
    data, weight = inputs[0], inputs[1]
    product = data @ (weight.T if node.attributes.get_int("transB", 0) else weight)
    return [product + inputs[2] if len(inputs) == 3 else product]


def _gemm_back(node: ir.Node, inputs: Arrays, _: Arrays, grads: Arrays) -> Grads:
    data, weight, grad = inputs[0], inputs[1], grads[0]
    bias = [_summed(grad, inputs[2].shape)] if len(inputs) == 3 else []
    if node.attributes.get_int("transB", 0):
        return [grad @ weight, grad.T @ data, *bias]
    return [grad @ weight.T, data.T @ grad, *bias]


def _rms_norm(node: ir.Node, inputs: Arrays) -> Arrays:
    return [inputs[0] * _inverse_rms(node, inputs[0]) * inputs[1]]


def _inverse_rms(node: ir.Node, data: Array) -> Array:
    squares = np.square(data).mean(axis=-1, keepdims=True)
    inverse: Array = 1 / np.sqrt(squares + np.float32(node.attributes.get_float("epsilon", 1e-5)))
    return inverse


def _rms_norm_back(node: ir.Node, inputs: Arrays, _: Arrays, grads: Arrays) -> Grads:
    inverse = _inverse_rms(node, inputs[0])
    unit, grad = inputs[0] * inverse, grads[0] * inputs[1]
    return [(grad - unit * (grad * unit).mean(axis=-1, keepdims=True)) * inverse, None]


def _layer_norm(node: ir.Node, inputs: Arrays) -> Arrays:
    scaled = _unit(node, inputs[0])[0] * inputs[1]
    return [scaled + inputs[2] if len(inputs) == 3 else scaled]


def _unit(node: ir.Node, data: Array) -> tuple[Array, Array]:
    """Return values of mean 0 and variance 1, and the factor that scaled them."""
    centered = data - data.mean(axis=-1, keepdims=True)
    inverse = _inverse_rms(node, centered)
    return centered * inverse, inverse


def _layer_norm_back(node: ir.Node, inputs: Arrays, _: Arrays, grads: Arrays) -> Grads:
    unit, inverse = _unit(node, inputs[0])
    grad = grads[0] * inputs[1]
    along = unit * (grad * unit).mean(axis=-1, keepdims=True)
    return [(grad - grad.mean(axis=-1, keepdims=True) - along) * inverse, None, None]


def _softmax(node: ir.Node, inputs: Arrays) -> Arrays:
    axis = _axis(node)
    powers = np.exp(inputs[0] - inputs[0].max(axis=axis, keepdims=True))
    return [powers / powers.sum(axis=axis, keepdims=True)]


def _softmax_back(node: ir.Node, _: Arrays, outputs: Arrays, grads: Arrays) -> Grads:
    axis, weights = _axis(node), outputs[0]
    return [weights * (grads[0] - (grads[0] * weights).sum(axis=axis, keepdims=True))]


def _cuts(node: ir.Node, data: Array, count: int, sizes: Sequence[int] | None) -> list[int]:
    width = data.shape[_axis(node)]
    each = sizes if sizes is not None else [-(-width // count)] * count
    return list(np.cumsum(each)[:-1])


def _split(node: ir.Node, inputs: Arrays) -> Arrays:
    sizes = inputs[1].tolist() if len(inputs) == 2 else None
    cuts = _cuts(node, inputs[0], len(node.outputs), sizes)
    return np.split(inputs[0], cuts, axis=_axis(node))


def _concat_back(node: ir.Node, inputs: Arrays, _: Arrays, grads: Arrays) -> Grads:
    axis = _axis(node)
    return np.split(grads[0], np.cumsum([one.shape[axis] for one in inputs])[:-1], axis=axis)


def _reshape(node: ir.Node, inputs: Arrays) -> Arrays:
    data, shape = inputs[0], inputs[1].tolist()
    if not node.attributes.get_int("allowzero", 0):
        shape = [data.shape[axis] if size == 0 else size for axis, size in enumerate(shape)]
    return [data.reshape(shape)]


def _slices(inputs: Arrays) -> tuple[slice, ...]:
    data, starts, ends = inputs[0], inputs[1].tolist(), inputs[2].tolist()
    axes = inputs[3].tolist() if len(inputs) > 3 else list(range(len(starts)))
    steps = inputs[4].tolist() if len(inputs) > 4 else [1] * len(starts)
    slices = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        slices[axis] = slice(start, end, step)
    return tuple(slices)


def _slice_back(_node: ir.Node, inputs: Arrays, _: Arrays, grads: Arrays) -> Grads:
    grad = np.zeros_like(inputs[0])
    grad[_slices(inputs)] = grads[0]
    return [grad]


def _gelu(node: ir.Node, inputs: Arrays) -> Arrays:
    return [inputs[0] * _gelu_parts(node, inputs[0])[0]]


def _gelu_parts(node: ir.Node, data: Array) -> tuple[Array, Array]:
    """Return the factor of GELU, and its derivative."""
    if node.attributes.get_string("approximate", "none") == "tanh":
        root = math.sqrt(2 / math.pi)
        tanh = np.tanh(root * (data + 0.044715 * data**3))
        slope = root * (1 + 3 * 0.044715 * data**2)
        return (1 + tanh) / 2, (1 - tanh**2) / 2 * slope
    from scipy.special import ndtr

    return ndtr(data), np.exp(-(data**2) / 2) / math.sqrt(2 * math.pi)


def _gelu_back(node: ir.Node, inputs: Arrays, _: Arrays, grads: Arrays) -> Grads:
    factor, slope = _gelu_parts(node, inputs[0])
    return [grads[0] * (factor + inputs[0] * slope)]


def _cast(node: ir.Node, inputs: Arrays) -> Arrays:
    kind = ir.DataType(node.attributes.get_int("to")).numpy()
    return [inputs[0].astype(np.float32 if kind.kind in "fV" else kind, copy=False)]


def _same_shape(_node: ir.Node, inputs: Arrays, _: Arrays, grads: Arrays) -> Grads:
    return [grads[0].reshape(inputs[0].shape)]


_FORWARD: Mapping[str, _Forward] = {
    "Add": lambda _, v: [v[0] + v[1]],
    "Cast": _cast,
    "Concat": lambda node, v: [np.concatenate(v, axis=_axis(node))],
    "CumSum": lambda _, v: [np.cumsum(v[0], axis=v[1].item())],
    "Div": lambda _, v: [v[0] / v[1]],
    "Gelu": _gelu,
    "Gemm": _gemm,
    "Identity": lambda _, v: [v[0]],
    "LayerNormalization": _layer_norm,
    "Less": lambda _, v: [v[0] < v[1]],
    "MatMul": lambda _, v: [v[0] @ v[1]],
    "Mul": lambda _, v: [v[0] * v[1]],
    "RMSNormalization": _rms_norm,
    "Reshape": _reshape,
    "Sigmoid": lambda _, v: [1 / (1 + np.exp(-v[0]))],
    "Slice": lambda _, v: [v[0][_slices(v)]],
    "Softmax": _softmax,
    "Split": _split,
    "Sub": lambda _, v: [v[0] - v[1]],
    "Tanh": lambda _, v: [np.tanh(v[0])],
    "Transpose": lambda node, v: [v[0].transpose(node.attributes.get_ints("perm", ()))],
    "Where": lambda _, v: [np.where(v[0], v[1], v[2])],
}
_BACKWARD: Mapping[str, _Backward] = {
    "Add": lambda _, v, __, g: [_summed(g[0], v[0].shape), _summed(g[0], v[1].shape)],
    "Cast": _same_shape,
    "Concat": _concat_back,
    "Div": lambda _, v, y, g: [
        _summed(g[0] / v[1], v[0].shape),
        _summed(-g[0] * y[0] / v[1], v[1].shape),
    ],
    "Gelu": _gelu_back,
    "Gemm": _gemm_back,
    "Identity": _same_shape,
    "LayerNormalization": _layer_norm_back,
    "MatMul": lambda _, v, __, g: [
        _summed(g[0] @ _turned(v[1]), v[0].shape),
        _summed(_turned(v[0]) @ g[0], v[1].shape),
    ],
    "Mul": lambda _, v, __, g: [_summed(g[0] * v[1], v[0].shape), _summed(g[0] * v[0], v[1].shape)],
    "RMSNormalization": _rms_norm_back,
    "Reshape": _same_shape,
    "Sigmoid": lambda _, __, y, g: [g[0] * y[0] * (1 - y[0])],
    "Slice": _slice_back,
    "Softmax": _softmax_back,
    "Split": lambda node, _, __, g: [np.concatenate(g, axis=_axis(node))],
    "Sub": lambda _, v, __, g: [_summed(g[0], v[0].shape), _summed(-g[0], v[1].shape)],
    "Tanh": lambda _, __, y, g: [g[0] * (1 - y[0] ** 2)],
    "Transpose": lambda node, _, __, g: [
        g[0].transpose(np.argsort(node.attributes.get_ints("perm", ())))
    ],
}
