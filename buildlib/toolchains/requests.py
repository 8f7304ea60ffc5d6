"""Requests of `OrtQnnToolchain` to its child process, pickled on stdin. All paths are absolute.

Pickled, as a child that need not import pydantic starts in half the time.
"""

from dataclasses import dataclass
from pathlib import Path

from buildlib.toolchains.base import GraphPorts, OpPackageLibrary, TensorInfo


@dataclass(frozen=True, slots=True)
class ConvertRequest:
    """Convert ONNX to a DLC in the empty `folder`; the answer is the name of the DLC."""

    onnx: Path
    folder: Path
    soc_model: int
    htp_arch: int


@dataclass(frozen=True, slots=True)
class GraphRequest:
    """A DLC and the options of its graph; `None` leaves a choice to the compiler.

    Attributes:
        ports: the DLC's inputs and outputs, in the order that the graph must have.
    """

    dlc: Path
    vtcm_mb: int
    optimization_level: int
    hvx_threads: int | None = None
    dlbc: bool | None = None
    dlbc_weights: bool | None = None
    ports: GraphPorts | None = None


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """Compile DLCs to a context binary; the answer is a `BinaryInfo`."""

    graphs: tuple[GraphRequest, ...]
    binary: Path
    soc_model: int
    weight_sharing: bool
    lora_weight_sharing: bool | None = None
    extended_udma: bool | None = None
    op_packages: tuple[OpPackageLibrary, ...] = ()


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """Describe a context binary; the answer is a `BinaryInfo`."""

    binary: Path


@dataclass(frozen=True, slots=True)
class ExecuteRequest:
    """Run a graph on the emulator, arrays as `.npz`; the answer is the output names."""

    binary: Path
    graph: str
    inputs: Path
    outputs: Path
    soc_model: int | None
    op_packages: tuple[OpPackageLibrary, ...] = ()


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Profile graphs on the emulator; the answer has each graph's nodes and their cycles."""

    binary: Path
    graphs: tuple[str, ...]
    soc_model: int
    repetitions: int
    op_packages: tuple[OpPackageLibrary, ...] = ()


@dataclass(frozen=True, slots=True)
class OpPackageRequest:
    """Register an op package; the answer is the operations that the backend knows through it."""

    package: OpPackageLibrary


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """Compile a graph of one node to a context binary; the answer is its size.

    Attributes:
        operation: of the package, e.g. `my.package::Scale`.
        inputs, outputs: of the node, and of the graph, which is named after the operation.
    """

    package: OpPackageLibrary
    operation: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    binary: Path
    soc_model: int
