"""The `Toolchain` Protocol between the builder and compilers, and the types that cross it."""

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

# Child processes import this module, and load no pydantic.
if TYPE_CHECKING:
    from buildlib.targets import Target
    from buildlib.toolchains.compile_config import CompileConfig


_BASE = 250 << 20
_GRAPH_COPIES = 2.15
_SHARED_COPIES, _BINARY_COPIES = 3.8, 2.3
_EMULATED_S = 1e-6
"""Seconds for a call, by byte of a binary: 16 times those of 128 tokens on an idle core."""


@dataclass(frozen=True, slots=True)
class ScaleOffset:
    """Affine quantization of a tensor in QNN's form: `real = (stored + offset) * scale`.

    `offset` is the negated zero point of ONNX.
    """

    scale: float
    offset: int


def host_fault() -> str:
    """Say why no compiler runs on this host; empty where one does."""
    if sys.platform == "linux" and platform.machine() == "x86_64":
        return ""
    return f"it needs Linux on x86_64, and this is {sys.platform} on {platform.machine()}"


NodeCycles = Mapping[str, Sequence[tuple[str, int]]]
"""Compiled nodes of graphs by name, in their order, and the cycles of each."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or output of a compiled graph.

    Attributes:
        dtype: NumPy's name of the stored type, e.g. `uint16`.
        encoding: `None` without quantization, and for other encodings than per tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: ScaleOffset | None


@dataclass(frozen=True, slots=True)
class OpPackageLibrary:
    """The library of an op package, and its function that provides the interface."""

    library: Path
    provider: str


@dataclass(frozen=True, slots=True)
class GraphPorts:
    """Inputs and outputs of a graph, in the order in which a program hands them over."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """One compiled graph of a context binary.

    Attributes:
        vtcm_bytes: tightly coupled memory that the graph was planned for.
        optimization_level: the compiler's effort, 1 to 3.
        spill_fill_bytes: DDR buffer for data that does not fit into VTCM.
    """

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    vtcm_bytes: int
    optimization_level: int
    spill_fill_bytes: int

    @property
    def vtcm_mb(self) -> int:
        """`vtcm_bytes` in MiB."""
        return self.vtcm_bytes >> 20

    def tensor(self, name: str) -> TensorInfo:
        """Return the input or output of that name."""
        return {tensor.name: tensor for tensor in (*self.inputs, *self.outputs)}[name]


@dataclass(frozen=True, slots=True)
class BinaryInfo:
    """Description of a context binary.

    Attributes:
        dsp_arch: Hexagon architecture that it was compiled for, e.g. `v79`.
        build_id: build of the compiler, e.g. `v2.51.0.260929181845`.
        blob_version: version of the binary's own format.
        size_bytes: size of the file.
    """

    graphs: tuple[GraphInfo, ...]
    soc_model: int
    dsp_arch: str
    build_id: str
    core_api_version: str
    backend_api_version: str
    blob_version: str
    size_bytes: int

    def graph(self, name: str) -> GraphInfo:
        """Return the graph of that name."""
        return {graph.name: graph for graph in self.graphs}[name]


class Toolchain(Protocol):
    """Compiles quantized ONNX for Hexagon.

    All native work happens in child processes: any failure there is a typed error here. Results
    appear whole or not at all.
    """

    @property
    def name(self) -> str:
        """Stable name for metadata and cache keys."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of everything that affects compiled results, in a fixed order.

        Raises:
            ToolchainMissingError: it is not installed here.
        """

    def check(self, config: "CompileConfig") -> None:
        """Refuse options that `compile` cannot honour; costs nothing, so it can be called early.

        Raises:
            InvalidOptionError: it cannot; names the option, and the toolchain that can.
        """

    def convert(self, onnx: Path, dlc: Path, target: "Target") -> None:
        """Convert ONNX in QDQ form to a DLC.

        Raises:
            ToolchainError: the model is refused, or the converter died.
        """

    def op_package(self, package: OpPackageLibrary) -> tuple[str, ...]:
        """Return the operations that an op package for this host adds, e.g. `my.package::Scale`.

        Raises:
            ToolchainError: the package does not register.
        """

    def compile(
        self,
        dlcs: Sequence[Path],
        binary: Path,
        config: "CompileConfig",
        op_packages: Sequence[OpPackageLibrary] = (),
        ports: Mapping[str, GraphPorts] | None = None,
    ) -> BinaryInfo:
        """Compile DLCs to one context binary; the stems of the DLCs name its graphs.

        Args:
            op_packages: those for this host, with operations of the graphs.
            ports: order of the inputs and outputs of graphs; by default the converter's.

        Returns:
            The description of the binary, as `inspect` gives it.

        Raises:
            InvalidOptionError: as `check`.
            ToolchainError: a DLC is refused, or the compiler died.
        """

    def inspect(self, binary: Path) -> BinaryInfo:
        """Describe a context binary.

        Raises:
            InputFileError: it cannot be read as one.
        """


def compile_memory_bytes(weight_bytes: int, n_graphs: int, *, weight_sharing: bool) -> int:
    """Estimate the peak memory of compiling graphs of equal weights into one binary.

    Measured with QNN 2.51 on decoder layers and output heads of Llama-3.2-1B's shape, W8A16: the
    compiler keeps about twice the weights of every graph, and nearly four copies of the binary
    while it writes it, of one without shared weights two.
    """
    written = _SHARED_COPIES if weight_sharing else _BINARY_COPIES * n_graphs
    return 2 * _BASE + int((_GRAPH_COPIES * n_graphs + written) * weight_bytes)


def emulated_s(n_bytes: int, calls: int) -> float:
    """Return what calls of graphs may take on the emulator at most, in seconds.

    Args:
        n_bytes: of the context binaries.
        calls: of all their graphs, one after another, of whatever AR.
    """
    return calls * n_bytes * _EMULATED_S
