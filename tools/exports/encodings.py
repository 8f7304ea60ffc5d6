"""Encodings in AIMET's file formats, from the ranges that ONNX Runtime sees on the sample.

Activations uint16, asymmetric, min to max; key/value tensors uint8, symmetric, past and new alike;
weights of two or more dimensions int8, symmetric, one scale for each output channel.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, numpy_helper

_FLOAT = TensorProto.FLOAT
_CHANNEL_AXIS = {"MatMul": 1, "Gemm": 0, "Conv": 0}

Grid = dict[str, Any]


def save_encodings(
    model_path: Path,
    feeds: Sequence[Mapping[str, torch.Tensor]],
    version: Literal["0.6.1", "1.0.0"],
) -> Path:
    """Write `<model>.encodings` beside the model."""
    model = onnx.load(model_path)
    activations = [_activation(name, lo, hi) for name, lo, hi in _ranges(model, feeds)]
    parameters = _parameters(model)
    write = _old if version == "0.6.1" else _new
    path = model_path.with_suffix(".encodings")
    data = write(_tie_caches(activations), parameters)
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    return path


def is_cache(name: str) -> bool:
    """Return whether a graph input or output of this name is part of the key/value cache."""
    return name.startswith(("past_", "present."))


def _ranges(
    model: onnx.ModelProto, feeds: Sequence[Mapping[str, torch.Tensor]]
) -> list[tuple[str, float, float]]:
    """Name, minimum and maximum of every float value that a node makes or the graph takes."""
    inferred = onnx.shape_inference.infer_shapes(model)
    kinds = {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    initializers = {t.name for t in model.graph.initializer}
    inputs = [
        v.name
        for v in model.graph.input
        if v.type.tensor_type.elem_type == _FLOAT and v.name not in initializers
    ]
    outputs = [v.name for v in model.graph.output]
    made = [
        name
        for node in model.graph.node
        if node.op_type != "Constant"
        for name in node.output
        if kinds.get(name) == _FLOAT
    ]
    names = [name for name in made if name not in outputs]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names)
    for name, value in zip(names, model.graph.output[len(outputs) :], strict=True):
        value.CopyFrom(onnx.helper.make_tensor_value_info(name, _FLOAT, None))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    known = {value.name for value in session.get_inputs()}
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for feed in feeds:
        given = {name: value.numpy() for name, value in feed.items() if name in known}
        wanted = [*outputs, *names]
        seen = dict(zip(wanted, session.run(wanted, given), strict=True))
        seen |= {name: given[name] for name in inputs if name in given}
        for name, value in seen.items():
            finite = value[np.abs(value) < 1e30] if value.size else value
            if finite.size:
                low[name] = min(low.get(name, 0.0), float(finite.min()))
                high[name] = max(high.get(name, 0.0), float(finite.max()))
    return [(name, low[name], high[name]) for name in [*inputs, *names, *outputs] if name in low]


def _activation(name: str, low: float, high: float) -> Grid:
    if is_cache(name):
        scale = _round(max(-low, high, 1e-6) / 127)
        return _grid(name, 8, [scale], [-128], symmetric=True)
    scale = _round(max(high - low, 1e-6) / 65535)
    return _grid(name, 16, [scale], [max(round(low / scale), -65535)], symmetric=False)


def _tie_caches(grids: list[Grid]) -> list[Grid]:
    """Give the past and the new entries of one cache one scale, the larger."""
    scales: dict[str, float] = {}
    for grid in grids:
        key = _cache_key(grid["name"])
        if key:
            scales[key] = max(scales.get(key, 0.0), grid["scale"][0])
    for grid in grids:
        key = _cache_key(grid["name"])
        if key:
            grid["scale"] = [scales[key]]
    return grids


def _cache_key(name: str) -> str | None:
    if not is_cache(name):
        return None
    for end in ("_in", "_out"):
        name = name.removesuffix(end)
    return name.removeprefix("present.").removeprefix("past_key_values.")


def _parameters(model: onnx.ModelProto) -> list[Grid]:
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    grids: dict[str, Grid] = {}
    for node in model.graph.node:
        for position, name in enumerate(node.input):
            weight = weights.get(name)
            if weight is None or weight.ndim < 2 or weight.dtype != np.float32:
                continue
            axis = _CHANNEL_AXIS.get(node.op_type) if position == 1 else None
            if node.op_type == "Gather" and position == 0:
                grids.setdefault(name, _weight(name, weight, None))
            elif axis is not None:
                grids[name] = _weight(name, weight, axis)
    return list(grids.values())


def _weight(name: str, weight: npt.NDArray[np.float32], axis: int | None) -> Grid:
    rest = tuple(i for i in range(weight.ndim) if i != axis)
    magnitudes = np.atleast_1d(np.abs(weight).max(axis=rest))
    scales = [_round(max(float(m), 1e-6) / 127) for m in magnitudes]
    return _grid(name, 8, scales, [-128] * len(scales), symmetric=True)


def _grid(name: str, bits: int, scale: list[float], offset: list[int], *, symmetric: bool) -> Grid:
    return {"name": name, "bw": bits, "scale": scale, "offset": offset, "is_sym": symmetric}


def _new(activations: list[Grid], parameters: list[Grid]) -> dict[str, Any]:
    """Format 1.0.0: lists of records."""

    def records(grids: list[Grid]) -> list[Grid]:
        kind = {True: "PER_TENSOR", False: "PER_CHANNEL"}
        return [
            {**grid, "dtype": "INT", "enc_type": kind[len(grid["scale"]) == 1]} for grid in grids
        ]

    return {
        "version": "1.0.0",
        "activation_encodings": records(activations),
        "param_encodings": records(parameters),
        "excluded_layers": [],
    }


def _old(activations: list[Grid], parameters: list[Grid]) -> dict[str, Any]:
    """Format 0.6.1: a list of grids, one for each channel, by name."""

    def grids(grid: Grid) -> list[dict[str, Any]]:
        steps = (1 << grid["bw"]) - 1
        return [
            {
                "bitwidth": grid["bw"],
                "dtype": "int",
                "is_symmetric": str(grid["is_sym"]),
                "max": _round(scale * (steps + offset)),
                "min": _round(scale * offset),
                "offset": offset,
                "scale": scale,
            }
            for scale, offset in zip(grid["scale"], grid["offset"], strict=True)
        ]

    return {
        "version": "0.6.1",
        "activation_encodings": {grid["name"]: grids(grid) for grid in activations},
        "param_encodings": {grid["name"]: grids(grid) for grid in parameters},
        "excluded_layers": [],
    }


def _round(value: float) -> float:
    """Round to six digits, for a shorter file."""
    return float(f"{value:.6g}")
