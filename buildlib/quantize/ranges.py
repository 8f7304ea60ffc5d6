"""Smallest and largest value of every activation, taken where it is computed.

The model gets a ReduceMin and a ReduceMax on each activation, so that a call returns two numbers
for each and no activation leaves the runtime, however large the model.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from buildlib.graph.files import load_model, save_model
from buildlib.graph.values import is_parameter, is_real
from buildlib.reference.runners import Arrays

_LOW, _HIGH = "__low", "__high"


@dataclass
class Ranges:
    """What has been seen so far."""

    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)

    def observe(self, outputs: Arrays, n_tokens: int) -> None:
        """Take in the outputs of one call of an instrumented model."""
        del n_tokens
        for name, array in outputs.items():
            if name.endswith(_LOW):
                key = name.removesuffix(_LOW)
                self.low[key] = min(self.low.get(key, np.inf), float(array))
            elif name.endswith(_HIGH):
                key = name.removesuffix(_HIGH)
                self.high[key] = max(self.high.get(key, -np.inf), float(array))

    def known(self) -> dict[str, tuple[float, float]]:
        """(smallest, largest) by name."""
        return {name: (low, self.high[name]) for name, low in self.low.items()}


def instrument(model_path: Path, out_path: Path) -> Path:
    """Write the model with the range of every activation as additional outputs."""
    model = load_model(model_path)
    graph = model.graph
    values = [value for node in graph for value in node.outputs]
    for value in values:
        if not is_real(value) or is_parameter(value):
            continue
        for op_type, suffix in (("ReduceMin", _LOW), ("ReduceMax", _HIGH)):
            output = ir.Value(
                name=f"{value.name}{suffix}",
                type=ir.TensorType(ir.DataType.FLOAT),
                shape=ir.Shape(()),
            )
            node = ir.node(op_type, [value], attributes={"keepdims": 0}, outputs=[output])
            graph.append(node)
            graph.outputs.append(output)
    return save_model(model, out_path)
