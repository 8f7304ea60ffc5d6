"""The `Toolchain` Protocol between the builder and compilers, and the types that cross it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from buildlib.targets import Target
from buildlib.toolchains.compile_config import CompileConfig

__all__ = ["BinaryInfo", "CompileConfig", "GraphInfo", "ScaleOffset", "TensorInfo", "Toolchain"]
_BASE = 250 << 20
_GRAPH_COPIES = 2.15
_BINARY_COPIES = 3.8


@dataclass(frozen=True, slots=True)
class ScaleOffset:
    """Affine quantization of a tensor, as QNN means it: `real = (stored + offset) * scale`.

    `offset` is the negated zero point of ONNX.
    """

    scale: float
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An input or output of a compiled graph.

    Attributes:
        dtype: NumPy's name of what is stored, e.g. `uint16`.
        encoding: `None` for what is not quantized, and for encodings other than per tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: ScaleOffset | None


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """One compiled graph of a context binary.

    Attributes:
        vtcm_bytes: tightly coupled memory that the graph was planned for.
        optimization_level: the compiler's effort, 1 to 3.
        spill_fill_bytes: DDR buffer that the graph needs for what does not fit into VTCM.
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
        """The input or output of that name.

        Raises:
            KeyError: there is none.
        """
        return {tensor.name: tensor for tensor in (*self.inputs, *self.outputs)}[name]


@dataclass(frozen=True, slots=True)
class BinaryInfo:
    """What a context binary says of itself.

    Attributes:
        dsp_arch: Hexagon architecture that it was compiled for, e.g. `v79`.
        build_id: build of the compiler, e.g. `v2.51.0.260929181845`.
        blob_version: version of the binary's own format.
        size_bytes: of the file.
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
        """The graph of that name.

        Raises:
            KeyError: there is none.
        """
        return {graph.name: graph for graph in self.graphs}[name]


class Toolchain(Protocol):
    """Compiles quantized ONNX for Hexagon.

    All native work happens in child processes: whatever happens there is a typed error here.
    Results appear whole or not at all.
    """

    @property
    def name(self) -> str:
        """Stable name for metadata and cache keys."""

    def versions(self) -> Mapping[str, str]:
        """Everything that decides what is compiled, in a fixed order.

        Raises:
            ToolchainMissingError: it is not installed here.
        """

    def check(self, config: CompileConfig) -> None:
        """Whether `compile` can do what is asked; free, so that it can be asked early.

        Raises:
            InvalidOptionError: it cannot; names the option, and the toolchain that can.
        """

    def convert(self, onnx: Path, dlc: Path, target: Target) -> None:
        """ONNX in QDQ form to a DLC.

        Raises:
            ToolchainError: the model is refused, or the converter died.
        """

    def compile(self, dlcs: Sequence[Path], binary: Path, config: CompileConfig) -> None:
        """DLCs to one context binary, whose graphs are named by the stems of the DLCs.

        Raises:
            InvalidOptionError: as `check`.
            ToolchainError: a DLC is refused, or the compiler died.
        """

    def inspect(self, binary: Path) -> BinaryInfo:
        """What is in a context binary.

        Raises:
            InvalidBinaryError: it cannot be read as one.
        """


def compile_memory_bytes(weight_bytes: int, n_graphs: int, *, weight_sharing: bool) -> int:
    """Bytes that compiling graphs of equal weights into one binary takes.

    Args:
        weight_bytes: of one graph.
    """
    copies = _GRAPH_COPIES * n_graphs + _BINARY_COPIES * (1 if weight_sharing else n_graphs)
    return 2 * _BASE + int(copies * weight_bytes)
