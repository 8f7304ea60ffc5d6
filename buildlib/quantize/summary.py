"""Summaries of how a model is quantized: types of its tensors, and options without effect."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

from buildlib.checkpoint.layout import ENCODINGS_FILE, MODEL_FILE
from buildlib.container.manifest import KV_BYTES, PRECISION
from buildlib.encodings.files import load_encodings
from buildlib.graph import interface
from buildlib.graph.files import load_model
from buildlib.graph.values import is_parameter, source_of, static_shape
from buildlib.quantize.grids import channel_axis, head_products
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.techniques.base import Factors

_PLAIN_KV_BITS = 8
"""Bits of caches that a precision does not name."""


def summarize_quantization(parts: Sequence[Path]) -> dict[str, str | int]:
    """Count the stored types of a model's tensors: `{"weights": "int4 per channel: 28"}`.

    The most frequent type comes first; single-head attention has a weight for each head.
    `precision` covers the linear layers between embedding and output projection: bits of their
    weights, and of the activations these are multiplied with; and those of the cache, if not 8.
    `kv_bytes_per_token` are the bytes that a token takes in the cache of all layers.

    Args:
        parts: QDQ models, each at one (AR, CL).
    """
    counts = _StorageCounts()
    for part in parts:
        counts.add_part(load_model(part).graph)
    return counts.as_facts()


def describe_factors(factors: Factors) -> str:
    """Return how many layers were rescaled, and how far channels of their caches lay apart."""
    caches = {name: values for name, values in factors.items() if interface.is_kv(name)}
    layers = {interface.kv_layer(name) for name in caches}
    most = max(float(values.max() / values.min()) for values in caches.values())
    return f"keys and values of {len(layers)} layers, by up to {most:.3g}"


class _StorageCounts:
    """Counts of stored types, by the use of the tensor."""

    def __init__(self) -> None:
        self._groups: dict[str, Counter[str]] = {}
        self._weight_bits: set[int] = set()
        self._data_bits: set[int] = set()
        self._caches: dict[str, tuple[int, int]] = {}

    def add_part(self, graph: ir.Graph) -> None:
        """Count the tensors of a part."""
        heads = head_products(graph)
        constants: dict[ir.Value, tuple[str, str]] = {}
        self._caches |= _cache_rows(graph)
        activations: dict[ir.Value, str] = {
            value: _type(value) for value in graph.outputs if value.dtype is not None
        }
        for node in graph:
            if node.op_type in {"DequantizeLinear", "QuantizeLinear"}:
                continue
            for index, value in enumerate(node.inputs):
                integers = None if value is None else _stored(value)
                if value is None or integers is None:
                    continue
                if not integers.is_initializer():
                    activations[integers] = _type(integers)
                    continue
                use = _use(node, index, head=node in heads)
                if integers not in constants or use != "constants":
                    constants[integers] = (use, f"{_type(integers)} {_kind(value)}")
                if use == "weights":
                    self._weight_bits.add(_bits(integers))
                    data = None if node.inputs[0] is None else _stored(node.inputs[0])
                    if data is not None:
                        self._data_bits.add(_bits(data))
        for use, text in constants.values():
            self._count(use, text)
        for integers, text in activations.items():
            cache = interface.is_kv(str(integers.name))
            self._count("kv_cache" if cache else "activations", text)

    def as_facts(self) -> dict[str, str | int]:
        """Return the counts as `summarize_quantization` gives them."""
        words: dict[str, str | int] = {
            group: ", ".join(f"{text}: {count}" for text, count in counts.most_common())
            for group, counts in self._groups.items()
        }
        if self._weight_bits and self._data_bits:
            weights, data = _joined(self._weight_bits), _joined(self._data_bits)
            cache = _joined({bits for bits, _ in self._caches.values()} - {_PLAIN_KV_BITS})
            words[PRECISION] = f"W{weights}A{data}" + (f"KV{cache}" if cache else "")
        if self._caches:
            words[KV_BYTES] = sum(bits * rows for bits, rows in self._caches.values()) // 8
        return words

    def _count(self, group: str, text: str) -> None:
        self._groups.setdefault(group, Counter())[text] += 1


def _cache_rows(graph: ir.Graph) -> dict[str, tuple[int, int]]:
    """Return bits of a value, and values of a token, of each output that goes into the cache."""
    return {
        name: (_bits(value), math.prod(dims) // dims[interface.token_axis(name)])
        for value in graph.outputs
        if interface.is_kv(name := str(value.name)) and (dims := static_shape(value)) is not None
    }


def _stored(value: ir.Value) -> ir.Value | None:
    """Return the integers that a real value is dequantized from."""
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


def ignored_options(folder: Path, options: QuantizationOptions, file: str) -> list[str]:
    """Return a line for each option that was set and that the model's encodings do not follow.

    Options apply to values without encodings; given encodings stay as they are.

    Args:
        folder: folder with the canonical model and its complete encodings.
        options: only those that were set count, not defaults.
        file: name of the given encodings file, for the lines.
    """
    set_options = options.model_fields_set & {
        "act_bitwidth",
        "param_bitwidth",
        "kv_bitwidth",
        "lpbq_block_size",
    }
    if not set_options:
        return []
    counts: dict[str, Counter[str]] = {}
    for key, what in _differing(folder, options):
        counts.setdefault(key, Counter())[what] += 1
    lines = []
    for key in sorted(set_options & counts.keys()):
        value = getattr(options, key)
        others = ", ".join(f"{count} {what}" for what, count in counts[key].most_common())
        lines.append(
            f"quantization.{key}={value} is for what has no encodings: {file} gives {others}, "
            "which stay so"
        )
    return lines


def _differing(folder: Path, options: QuantizationOptions) -> Iterator[tuple[str, str]]:
    """Yield (option, the value in effect) of each cache and each tensor of a linear layer."""
    graph = load_model(folder / MODEL_FILE).graph
    encodings = load_encodings(folder / ENCODINGS_FILE).by_name()
    for value in graph.outputs:
        cache = encodings.get(str(value.name)) if interface.is_kv(str(value.name)) else None
        if cache is not None and cache.bw != options.kv_bitwidth:
            yield "kv_bitwidth", f"keys and values of {cache.bw} bits"
    heads = head_products(graph)
    for node in graph:
        if node in heads or len(node.inputs) < 2:
            continue
        data, weight = node.inputs[:2]
        if data is None or weight is None or channel_axis(node, 1) is None:
            continue
        if not is_parameter(weight):
            continue
        weight_encoding = encodings.get(str(source_of(weight).name))
        if weight_encoding is not None:
            if weight_encoding.stored_bits != options.param_bitwidth:
                yield "param_bitwidth", f"weights of {weight_encoding.stored_bits} bits"
            if weight_encoding.block_size != options.lpbq_block_size:
                blocks = weight_encoding.block_size
                yield (
                    "lpbq_block_size",
                    f"weights in blocks of {blocks}" if blocks else "weights without blocks",
                )
        data_encoding = encodings.get(str(data.name))
        if data_encoding is not None and data_encoding.bw != options.act_bitwidth:
            yield "act_bitwidth", f"activations of {data_encoding.bw} bits"
