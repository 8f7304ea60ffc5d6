"""Encodings of plausible size for a model of `random_llama`, by no look at its weights."""

from pathlib import Path

import numpy as np

from buildlib.encodings.files import save_encodings
from buildlib.encodings.model import Encoding, Encodings, asymmetric_encoding, symmetric_encoding
from buildlib.graph import interface
from buildlib.graph.files import load_model
from buildlib.graph.values import is_parameter, is_real, source_of
from buildlib.passes.base import ENCODINGS_SUFFIX
from buildlib.quantize.grids import shared_grids

_RANGES = {"Softmax": (0.0, 1.0), "Sigmoid": (0.0, 1.0)}
_INPUTS = {
    interface.ATTENTION_MASK: (interface.MASKED, 0.0),
    interface.COS: (-1.0, 1.0),
    interface.SIN: (-1.0, 1.0),
}
_DEVIATIONS = 5.5  # the largest of some thousand random numbers


def write_random_encodings(model_path: Path, weight_bits: int = 8) -> Path:
    """Write the encodings beside a model: activations 16 bits, caches 8, a scale for each row.

    Matrices have `weight_bits` and a grid for each output channel that covers its random numbers.
    """
    graph = load_model(model_path).graph
    rng = np.random.default_rng(11)
    ranges = dict(_INPUTS)
    for node in graph:
        if node.op_type in _RANGES:
            ranges[str(node.outputs[0].name)] = _RANGES[node.op_type]
    activations: dict[str, Encoding] = {}
    for names in shared_grids(graph):
        cached = any(map(interface.is_kv, names))
        low, high = next((ranges[name] for name in names if name in ranges), (-12.0, 12.0))
        for name in names:
            activations[name] = (
                symmetric_encoding(name, 12.0, 8)
                if cached
                else asymmetric_encoding(name, low, high, 16)
            )
    params: dict[str, Encoding] = {}
    for node in graph:
        for value in node.inputs:
            if value is None or not is_parameter(value) or not is_real(value):
                continue
            source = source_of(value)
            name, tensor = str(source.name), source.const_value
            if tensor is None or node.op_type != "Gemm":
                params.setdefault(
                    name, activations.pop(name, asymmetric_encoding(name, -2.0, 2.0, 16))
                )
                continue
            rows, width = (int(dim) for dim in tensor.shape.numpy())
            largest = _DEVIATIONS / np.sqrt(width) * rng.uniform(0.8, 1.0, rows)
            half = 1 << (weight_bits - 1)
            params[name] = Encoding(
                name=name,
                dtype="INT",
                enc_type="PER_CHANNEL",
                bw=weight_bits,
                is_sym=True,
                scale=tuple((largest / (half - 1)).tolist()),
                offset=(-half,) * rows,
            )
    kept = tuple(encoding for name, encoding in activations.items() if name not in params)
    encodings = Encodings(activation_encodings=kept, param_encodings=tuple(params.values()))
    return save_encodings(encodings, model_path.with_suffix(ENCODINGS_SUFFIX))
