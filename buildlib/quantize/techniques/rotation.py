"""Rotations of SpinQuant, folded into weights: the model computes the same, with fewer outliers.

Liu et al., "SpinQuant: LLM Quantization with Learned Rotations", 2024: R1 turns the residual stream
and R2 the values of each head; both vanish into the weights before and after. They are random here,
not learned: a Hadamard matrix with random signs, times that of a Hartley transform where the width
is no power of two, whose entries are hardly larger than those of a Hadamard matrix. The gains of
the norms that read the residual stream are folded into the weights behind them first.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.cancellation import check_cancelled
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.errors import InvalidOptionError
from buildlib.graph import interface
from buildlib.graph.files import load_model, save_model, tensor_array
from buildlib.graph.values import PRODUCTS, is_linear, is_parameter, source_of, static_shape
from buildlib.quantize.grids import channel_axis, head_weights
from buildlib.quantize.techniques.base import FloatModel
from buildlib.quantize.tensor_writer import TensorWriter, replace_constant

_CHUNK_ROWS = 4096
_LAYOUT = frozenset({"Reshape", "Identity", "Squeeze", "Unsqueeze"})
ROTATED = "qnnfarm.rotated"
"""Property of a rotated model, with the seed of its rotations.

What was trained on its hidden states does not fit them any more.
"""
_LARGEST_HADAMARD = 32
Matrix = npt.NDArray[Any]


@dataclass(frozen=True)
class Rotation:
    """`WeightTechnique` that folds R1 and R2 into the weights of a whole model.

    Attributes:
        seed: of the random matrices.
    """

    name: str
    seed: int = 0

    def optimize(
        self, model: FloatModel, folder: Path, progress: Callable[[int, int], None] | None = None
    ) -> FloatModel:
        """Write the rotated model; its weights are on no grid yet."""
        if model.encodings.by_name():
            raise _refused("it changes weights and activations, and some have encodings")
        path = write_rotated(model.path, self.seed, folder, progress)
        return model.changed(path, model.encodings)


def write_rotated(
    path: Path, seed: int, folder: Path, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Write `model.onnx` with R1 and R2 in its weights; `folder` is as techniques take it.

    Raises:
        InvalidOptionError: something reads or makes the residual stream that cannot be turned.
    """
    whole = load_model(path)
    plan = _Search(whole.graph, seed).changes()
    heads = head_weights(whole.graph)
    ends = {n for n, change in plan.items() if n in heads or change.table or change.ones}
    # Two files: techniques after this one replace what is in the second, and drop it.
    for part, names in (("ends", ends), ("layers", plan.keys() - ends)):
        shapes = {name: change.shape for name, change in plan.items() if name in names}
        with TensorWriter(folder / f"rotated_{part}.safetensors", shapes) as file:
            for n_done, name in enumerate(shapes, 1):
                check_cancelled()
                for start, rows in plan[name].rows():
                    file.write(name, rows, start)
                if progress is not None:
                    progress(n_done, len(shapes))
            for name in shapes:
                replace_constant(whole.graph, name, file.tensor(name))
    whole.metadata_props[ROTATED] = str(seed)
    return save_model(whole, folder / MODEL_FILE)


def coarsening(path: Path, seed: int = 0) -> float:
    """Return by how much the steps of a weight grow at most, if a model is rotated.

    A weight that writes far larger numbers into one channel than into others writes them into all
    channels then, each of which has one step for all that it sums up.

    Raises:
        InvalidOptionError: as `write_rotated` does.
    """
    changes = _Search(load_model(path).graph, seed).changes().values()
    return max((each.coarsening() for each in changes if each.left is not None), default=1.0)


def rotation_of(path: Path) -> int | None:
    """Return the seed with which a model was rotated; None if it was not."""
    seed = load_model(path).metadata_props.get(ROTATED)
    return None if seed is None else int(seed)


@dataclass(frozen=True)
class RandomRotation:
    """A random orthogonal matrix `diag(signs) @ kron(*factors)`, applied factor by factor.

    Attributes:
        signs: [width], 1 or -1.
        factors: orthogonal: Hadamard matrices as far as powers of two divide the width, and a
            Hartley matrix of the rest.
    """

    signs: Matrix
    factors: tuple[Matrix, ...]

    @classmethod
    def of(cls, width: int, random: np.random.Generator) -> "RandomRotation":
        """Draw one."""
        from scipy.linalg import hadamard

        power = width & -width
        angles = np.outer(*[np.arange(width // power)] * 2) * (2 * math.pi * power / width)
        factors = [(np.cos(angles) + np.sin(angles)) / math.sqrt(len(angles))]
        while power > 1:
            size = min(power, _LARGEST_HADAMARD)
            factors.append(hadamard(size) / math.sqrt(size))
            power //= size
        return cls(random.choice([-1.0, 1.0], size=width), tuple(factors))

    def turn(self, values: Matrix) -> Matrix:
        """Return `values @ self` of the last axis, or of each piece of it that is so wide."""
        width = len(self.signs)
        turned = values.reshape(-1, width) * self.signs
        for factor in reversed(self.factors):  # each time, the axis of the next one becomes last
            pieces = turned.reshape(len(turned), -1, len(factor)) @ factor
            turned = pieces.swapaxes(1, 2).reshape(-1, width)
        return turned.reshape(values.shape)


@dataclass
class _Change:
    """New values of a constant: `left.T @ values * gain @ right` of a matrix [out, in] or a table.

    Attributes:
        source: the constant.
        transposed: whether it is stored as [in, out].
        gain: of the norm before it, [in].
        right: rotation of its inputs, or of the rows of a table; of each head, where it is
            narrower.
        left: rotation of its outputs, likewise.
        ones: it is a gain that was folded away.
        table: it is the table of the tokens.
    """

    source: ir.Value
    transposed: bool = False
    gain: Matrix | None = None
    right: RandomRotation | None = None
    left: RandomRotation | None = None
    ones: bool = False
    table: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return static_shape(self.source) or ()

    def coarsening(self) -> float:
        """Return the median largest value of its channels, over that of today; 1 for a bias."""
        assert self.source.const_value is not None  # noqa: S101  (an initializer)
        values = tensor_array(self.source.const_value).astype(np.float64)
        if values.ndim == 1:
            return 1.0
        values = values.T if self.transposed else values
        before, after = (
            float(np.median(np.abs(each).max(axis=1))) for each in (values, self._turned(values))
        )
        return after / max(before, 1e-30)

    def rows(self) -> Iterator[tuple[int, Matrix]]:
        """Yield the new values as stored, some rows at a time if nothing mixes rows."""
        assert self.source.const_value is not None  # noqa: S101  (an initializer)
        if self.ones:
            yield 0, np.ones(self.shape)
            return
        values = tensor_array(self.source.const_value)
        if self.transposed or self.left is not None or values.ndim == 1:
            whole = values.T if self.transposed else values
            new = self._turned(whole.astype(np.float64))
            yield 0, new.T if self.transposed else new
            return
        for start in range(0, len(values), _CHUNK_ROWS):
            yield start, self._turned(values[start : start + _CHUNK_ROWS].astype(np.float64))

    def _turned(self, values: Matrix) -> Matrix:
        if self.gain is not None:
            values = values * self.gain
        if self.right is not None:
            values = self.right.turn(values)
        return values if self.left is None else self.left.turn(values.T).T


class _Search:
    """Search for all that turns with the residual stream, and with the values of each head."""

    def __init__(self, graph: ir.Graph, seed: int) -> None:
        self._graph = graph
        self._found: dict[str, _Change] = {}
        self._stream: set[ir.Value] = set()
        self._random = np.random.default_rng(seed)
        self._width = 0
        self._r1: RandomRotation | None = None

    def changes(self) -> dict[str, _Change]:
        """Return the change of each constant by its name."""
        for node in self._graph:
            if node.op_type == "Gather" and not self._stream and _constant(node, 0) is not None:
                self._begin(node)
            elif any(value in self._stream for value in node.inputs):
                self._follow(node)
        if not self._stream:
            raise _refused("the model looks up no tokens in a table")
        for value in self._graph.outputs:
            layer = interface.kv_layer(str(value.name))
            if layer is not None and str(value.name) == interface.past_value(layer, "out"):
                self._turn_values(value, layer)
        return self._found

    def _begin(self, node: ir.Node) -> None:
        table = self._change(node, 0)
        self._width = table.shape[-1]
        self._r1 = RandomRotation.of(self._width, self._random)
        table.right, table.table = self._r1, True
        self._stream.add(node.outputs[0])

    def _follow(self, node: ir.Node) -> None:
        """Take one node that reads the stream."""
        if node.op_type == "RMSNormalization" and node.inputs[0] in self._stream:
            self._fold_gain(node)
            return
        others = [value for value in node.inputs if value is not None and value not in self._stream]
        if node.op_type == "Add" and len(others) == 1 and not is_parameter(others[0]):
            self._turn_outputs(_product_before(others[0]))
        elif node.op_type == "Mul" and len(others) == 1 and _is_scalar(others[0]):
            pass
        elif node.op_type not in _LAYOUT or _width(node.outputs[0]) != self._width:
            raise _refused(f"{node.name} ({node.op_type}) reads the residual stream")
        self._stream.update(node.outputs)

    def _fold_gain(self, node: ir.Node) -> None:
        gain = self._change(node, 1)
        assert gain.source.const_value is not None  # noqa: S101  (an initializer)
        values = tensor_array(gain.source.const_value).astype(np.float64)
        gain.ones = True
        for product in _products_after(node.outputs[0]):
            weight = self._change(product, 1)
            weight.gain, weight.right = values, self._r1

    def _turn_outputs(self, product: ir.Node) -> None:
        for index in range(1, len(product.inputs)):
            self._change(product, index).left = self._r1

    def _turn_values(self, value: ir.Value, layer: int) -> None:
        """Turn the values of a layer's heads, and turn them back behind the attention."""
        before = _product_before(value)
        past = next(
            (v for v in self._graph.inputs if v.name == interface.past_value(layer, "in")), None
        )
        after = None if past is None else _product_behind_attention(past)
        dims = static_shape(value)
        if after is None or dims is None:
            raise _refused(f"nothing multiplies the values of layer {layer}")
        r2 = RandomRotation.of(dims[-1], self._random)
        for index in range(1, len(before.inputs)):
            self._change(before, index, again=True).left = r2
        self._change(after, 1, again=True).right = r2

    def _change(self, node: ir.Node, index: int, *, again: bool = False) -> _Change:
        source = _constant(node, index)
        if source is None:
            raise _refused(f"{node.name} ({node.op_type}) computes with no constant")
        name = str(source.name)
        if name in self._found and not again:
            raise _refused(f"{name} is used twice, as tied embeddings are; export it untied")
        transposed = index == 1 and channel_axis(node, 1) == 1
        return self._found.setdefault(name, _Change(source, transposed))


def _constant(node: ir.Node, index: int) -> ir.Value | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return source_of(value) if value is not None and is_parameter(value) else None


def _width(value: ir.Value) -> int | None:
    dims = static_shape(value)
    return dims[-1] if dims else None


def _is_scalar(value: ir.Value) -> bool:
    shape = static_shape(source_of(value))
    return is_parameter(value) and shape is not None and math.prod(shape) == 1


def is_scaling(node: ir.Node) -> bool:
    """Return whether a node multiplies all of a value by one constant number."""
    return node.op_type == "Mul" and any(v is not None and _is_scalar(v) for v in node.inputs)


def _product_before(value: ir.Value) -> ir.Node:
    """Return the product that makes a value, but for its layout and a factor."""
    node = value.producer()
    while node is not None and node.op_type not in PRODUCTS:
        if not (is_scaling(node) or node.op_type in _LAYOUT or node.op_type == "Transpose"):
            break
        data = next((v for v in node.inputs if v is not None and not is_parameter(v)), None)
        node = None if data is None else data.producer()
    if node is None or not is_linear(node):
        raise _refused(f"no weight alone makes {value.name}")
    return node


def _products_after(value: ir.Value) -> list[ir.Node]:
    """Return the products that read a value, but for its layout and a factor."""
    products = []
    for node, index in value.uses():
        if node.op_type in _LAYOUT or is_scaling(node):
            products += _products_after(node.outputs[0])
        elif is_linear(node) and index == 0:
            products.append(node)
        else:
            raise _refused(f"{node.name} ({node.op_type}) reads a norm of the residual stream")
    return products


def _product_behind_attention(past: ir.Value) -> ir.Node | None:
    """Return the first product with a weight behind the attention to these values."""
    value = past
    while True:
        users = [node for node, _ in value.uses()]
        if len(users) != 1:
            return None
        node = users[0]
        if is_linear(node):
            return node
        if node.op_type not in _LAYOUT | {"Concat", "MatMul", "Transpose"}:
            return None
        value = node.outputs[0]


def _refused(reason: str) -> InvalidOptionError:
    return InvalidOptionError("quantization.techniques", f"spinquant cannot be used: {reason}", ())
