"""Runners of one part of a model: the `PartRunner` Protocol, and ONNX Runtime on the CPU."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx

from buildlib.encodings.grid import Grid
from buildlib.error_base import one_line
from buildlib.errors import ModelFileError
from buildlib.graph import interface
from buildlib.graph.files import load_proto
from buildlib.graph.values import declared_shape

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Port:
    """An input or output of a part.

    Attributes:
        dtype: of values as stored.
        grid: the reals that integers stand for; None for float32 and token ids.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    grid: Grid | None = None

    def quantize(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Quantize float values if the port takes integers; integers pass unchanged."""
        if values.dtype == np.float32 and self.grid is not None:
            return self.grid.quantize(values)
        return values.astype(self.dtype, copy=False)

    def dequantize(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the real numbers that stored values mean."""
        if self.grid is not None:
            return self.grid.dequantize(values)
        return values.astype(np.float32, copy=False)


@dataclass(frozen=True)
class Ports:
    """All inputs and outputs of a part, by name."""

    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]

    def feeds(self, values: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Select and convert the inputs of the part from all values."""
        return {name: port.quantize(values[name]) for name, port in self.inputs.items()}


class PartRunner(Protocol):
    """Runs one part of a model at one (AR, CL)."""

    @property
    def ports(self) -> Ports:
        """Inputs and outputs of the part."""
        ...

    def run(self, feeds: Arrays) -> Arrays:
        """Return all outputs for all inputs, in the types of the ports."""
        ...

    def close(self) -> None:
        """Release sessions and processes; the runner is not used again."""
        ...


def part_sizes(inputs: Mapping[str, Sequence[int]]) -> tuple[int, int | None]:
    """Return AR and CL of a model or part, from the shapes of its inputs.

    CL is None for a part without attention: a separate embedding or output projection.

    Raises:
        ValueError: no input tells the AR.
    """
    shape = interface.shape_of(inputs)
    if shape is not None:
        return shape.ar, shape.cl
    lengths = {dims[1] for dims in inputs.values() if 2 <= len(dims) <= 3 and dims[0] == 1}
    if len(lengths) != 1:
        raise ValueError(f"no AR can be told from inputs {dict(inputs)}")
    return lengths.pop(), None


def read_ports(path: Path) -> Ports:
    """Return the ports of a float or QDQ ONNX model, with the grids of its QDQ nodes."""
    graph = load_proto(path).graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    readers = {n.input[0]: n for n in reversed(graph.node) if n.op_type == "DequantizeLinear"}
    writers = {n.output[0]: n for n in graph.node if n.op_type == "QuantizeLinear"}

    def ports(
        values: Iterable[onnx.ValueInfoProto], grids: Mapping[str, onnx.NodeProto]
    ) -> dict[str, Port]:
        return {v.name: _port(path, v, _grid_of(grids.get(v.name), constants)) for v in values}

    return Ports(ports(graph.input, readers), ports(graph.output, writers))


class OnnxRunner:
    """Runs a float or QDQ ONNX model on ONNX Runtime's CPU provider.

    Quantization is computed as the model spells it (integers only where values are stored, float32
    between), so the result does not depend on the integer kernels of this CPU.

    Args:
        path: the model; float weights beside it are mapped if `plain`, else loaded.
        n_threads: 0 for one a core.
        plain: compute the file node by node, nothing fused, folded or packed. Weights
            then stay pages of their files, which the system can drop, and loading takes no time.

    Raises:
        ModelFileError: the file is not a model that can run.
    """

    def __init__(self, path: Path, *, n_threads: int = 0, plain: bool = False) -> None:
        self._path = path
        self.ports = read_ports(path)
        self._session = open_session(path, n_threads, plain=plain)

    def run(self, feeds: Arrays) -> Arrays:
        """Return all outputs, as fresh arrays."""
        names = list(self.ports.outputs)
        inputs = {name: feeds[name] for name in self.ports.inputs}
        return dict(zip(names, run_session(self._path, self._session, names, inputs), strict=True))

    def close(self) -> None:
        """Free the session."""
        self._session = None


def run_session(path: Path, session: Any, names: list[str], feeds: Arrays) -> list[Any]:  # noqa: ANN401
    """Run a session of the model at `path` and return its outputs."""
    try:
        outputs: list[Any] = session.run(names, dict(feeds))
    except Exception as error:  # the runtime raises a dozen private kinds
        reason = one_line(str(error), 200)
        raise ModelFileError(path, f"it cannot be run: {reason}") from error
    return outputs


def open_session(path: Path, n_threads: int = 0, *, plain: bool = True) -> Any:  # noqa: ANN401
    """Open an `InferenceSession` on the CPU provider, as `OnnxRunner` does."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.intra_op_num_threads = n_threads
    # Threads that wait for work would keep a core busy, which other programs want as well.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    if plain:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime raises a dozen private kinds
        raise ModelFileError(path, str(error).splitlines()[0][:200]) from error


def _port(path: Path, value: onnx.ValueInfoProto, grid: Grid | None) -> Port:
    shape, kind = declared_shape(value), value.type.tensor_type.elem_type
    if shape is None or kind == onnx.TensorProto.UNDEFINED:
        raise ModelFileError(path, f"{value.name} has no static shape and type")
    return Port(value.name, onnx.helper.tensor_dtype_to_np_dtype(kind), shape, grid)


def _grid_of(node: onnx.NodeProto | None, constants: Mapping[str, onnx.TensorProto]) -> Grid | None:
    """Return the grid of a QDQ node with constant scale and zero point."""
    scale, zero = (constants.get(name) for name in node.input[1:3]) if node else (None, None)
    if scale is None or zero is None:
        return None
    scales, zeros = onnx.numpy_helper.to_array(scale), onnx.numpy_helper.to_array(zero)
    return Grid(zeros.dtype, tuple(scales.reshape(-1).tolist()), tuple(zeros.reshape(-1).tolist()))
