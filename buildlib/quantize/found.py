"""How a model is quantized, read from the tensors of its quantized parts: what was done."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx_ir as ir

from buildlib.container.manifest import PRECISION
from buildlib.graph import interface
from buildlib.graph.files import load_model
from buildlib.graph.infer import static_shape
from buildlib.quantize.head import head_products
from buildlib.quantize.weights import channel_axis


def found_quantization(parts: Sequence[Path]) -> dict[str, str]:
    """What the tensors of a model are stored as: `{"weights": "int4 per channel: 28"}`.

    Numbers are those of tensors, the most frequent type first; single-head attention has a weight
    for each head. `precision` tells of the linear layers between embedding and output projection
    alone: bits of their weights, and of what these are multiplied with.

    Args:
        parts: QDQ models, each at one (AR, CL).

    Raises:
        ModelFileError: one is no sound model.
    """
    found = _Found()
    for part in parts:
        found.take(load_model(part).graph)
    return found.in_words()


class _Found:
    """Types of what has been seen so far, by what it is there for."""

    def __init__(self) -> None:
        self._groups: dict[str, Counter[str]] = {}
        self._weight_bits: set[int] = set()
        self._data_bits: set[int] = set()

    def take(self, graph: ir.Graph) -> None:
        """Take in a part."""
        heads = head_products(graph)
        constants: dict[ir.Value, tuple[str, str]] = {}
        activations: dict[ir.Value, str] = {
            value: _type(value) for value in graph.outputs if value.dtype is not None
        }
        for node in graph:
            if node.op_type in {"DequantizeLinear", "QuantizeLinear"}:
                continue
            for index, value in enumerate(node.inputs):
                stored = None if value is None else _stored(value)
                if value is None or stored is None:
                    continue
                if not stored.is_initializer():
                    activations[stored] = _type(stored)
                    continue
                use = _use(node, index, head=node in heads)
                if stored not in constants or use != "constants":
                    constants[stored] = (use, f"{_type(stored)} {_kind(value)}")
                if use == "weights":
                    self._weight_bits.add(_bits(stored))
                    data = None if node.inputs[0] is None else _stored(node.inputs[0])
                    if data is not None:
                        self._data_bits.add(_bits(data))
        for use, text in constants.values():
            self._count(use, text)
        for stored, text in activations.items():
            cache = interface.is_kv(str(stored.name))
            self._count("kv_cache" if cache else "activations", text)

    def in_words(self) -> dict[str, str]:
        """As `found_quantization` gives it."""
        words = {
            group: ", ".join(f"{text}: {count}" for text, count in counts.most_common())
            for group, counts in self._groups.items()
        }
        if self._weight_bits and self._data_bits:
            weights, data = _joined(self._weight_bits), _joined(self._data_bits)
            words[PRECISION] = f"W{weights}A{data}"
        return words

    def _count(self, group: str, text: str) -> None:
        self._groups.setdefault(group, Counter())[text] += 1


def _stored(value: ir.Value) -> ir.Value | None:
    """The integers that a real value is made of."""
    maker = value.producer()
    if maker is None or maker.op_type != "DequantizeLinear":
        return None
    return maker.inputs[0]


def _use(node: ir.Node, index: int, *, head: bool) -> str:
    if channel_axis(node, index) is not None:
        return "head" if head else "weights"
    return "embedding" if node.op_type == "Gather" and index == 0 else "constants"


def _kind(real: ir.Value) -> str:
    maker = real.producer()
    scale = None if maker is None else maker.inputs[1]
    if maker is not None and "block_size" in maker.attributes:
        return "LPBQ"
    return "per channel" if scale is not None and static_shape(scale) else "per tensor"


def _type(value: ir.Value) -> str:
    return ir.DataType(value.dtype).name.lower() if value.dtype is not None else "unknown"


def _bits(value: ir.Value) -> int:
    return 0 if value.dtype is None else int(value.dtype.bitwidth)


def _joined(bits: Iterable[int]) -> str:
    return "/".join(map(str, sorted(bits)))
