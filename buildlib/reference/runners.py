"""What runs one part of a model, and the plainest one: ONNX Runtime on the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from buildlib.errors import ModelFileError
from buildlib.graph.files import load_model
from buildlib.graph.infer import static_shape
from buildlib.quantize.grid import Grid

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Port:
    """An input or output of a part.

    Attributes:
        dtype: what the part takes or gives.
        grid: what its integers mean; None for float32 and for token ids.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    grid: Grid | None = None


@dataclass(frozen=True)
class Ports:
    """All inputs and outputs of a part, by name."""

    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]


class PartRunner(Protocol):
    """Runs one part of a model at one (AR, CL)."""

    @property
    def ports(self) -> Ports:
        """What the part takes and gives."""
        ...

    def run(self, feeds: Arrays) -> Arrays:
        """All outputs for all inputs, in the types of the ports."""
        ...

    def close(self) -> None:
        """Let go of sessions and processes; the runner is not used again."""
        ...


def read_ports(path: Path) -> Ports:
    """The ports of a float or QDQ ONNX model, with the grids that its own QDQ nodes give.

    Raises:
        ModelFileError: a dimension is dynamic.
    """
    model = load_model(path)
    inputs = {str(v.name): _port(path, v, _grid_of_input(v)) for v in model.graph.inputs}
    outputs = {str(v.name): _port(path, v, _grid_of_output(v)) for v in model.graph.outputs}
    return Ports(inputs, outputs)


class OnnxRunner:
    """A float or QDQ ONNX model on ONNX Runtime's CPU provider.

    Quantization is computed as the model spells it (integers only where values are stored, float32
    between), so that the result does not depend on which integer kernels this CPU has.
    """

    def __init__(self, path: Path, *, n_threads: int = 0) -> None:
        self._ports = read_ports(path)
        options = ort.SessionOptions()
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.intra_op_num_threads = n_threads
        options.log_severity_level = 3
        try:
            self._session: Any = ort.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # the runtime raises a dozen private kinds
            raise ModelFileError(path, str(error).splitlines()[0][:200]) from error

    @property
    def ports(self) -> Ports:
        """As the model file declares them."""
        return self._ports

    def run(self, feeds: Arrays) -> Arrays:
        """All outputs, as fresh arrays."""
        names = list(self._ports.outputs)
        results = self._session.run(names, {name: feeds[name] for name in self._ports.inputs})
        return dict(zip(names, results, strict=True))

    def close(self) -> None:
        """Free the session."""
        self._session = None


def _port(path: Path, value: ir.Value, grid: Grid | None) -> Port:
    shape = static_shape(value)
    if shape is None or value.dtype is None:
        raise ModelFileError(path, f"{value.name} has no static shape")
    return Port(str(value.name), value.dtype.numpy(), shape, grid)


def _grid_of_input(value: ir.Value) -> Grid | None:
    for node in value.consumers():
        if node.op_type == "DequantizeLinear":
            return _grid_of(node)
    return None


def _grid_of_output(value: ir.Value) -> Grid | None:
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "QuantizeLinear":
        return _grid_of(node)
    return None


def _grid_of(node: ir.Node) -> Grid | None:
    scale, zero = (value.const_value if value is not None else None for value in node.inputs[1:3])
    if scale is None or zero is None:
        return None
    zeros = zero.numpy()
    return Grid(
        zeros.dtype,
        tuple(float(s) for s in scale.numpy().reshape(-1)),
        tuple(int(z) for z in zeros.reshape(-1)),
    )
