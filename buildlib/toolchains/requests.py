"""What `OrtQnnToolchain` asks of its child process, as JSON on stdin. All paths are absolute."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ConvertRequest:
    """ONNX to a DLC in `folder`, which is empty; answered by the DLC's name."""

    onnx: Path
    folder: Path
    soc_model: int
    htp_arch: int


@dataclass(frozen=True, slots=True)
class GraphRequest:
    """A DLC, and how its graph is compiled; `None` is the compiler's own choice."""

    dlc: Path
    vtcm_mb: int
    optimization_level: int
    hvx_threads: int | None = None
    dlbc: bool | None = None
    dlbc_weights: bool | None = None


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """DLCs to a context binary; answered by its size."""

    graphs: tuple[GraphRequest, ...]
    binary: Path
    soc_model: int
    weight_sharing: bool
    lora_weight_sharing: bool | None = None
    extended_udma: bool | None = None


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """A context binary to describe; answered by a `BinaryInfo`."""

    binary: Path


@dataclass(frozen=True, slots=True)
class ExecuteRequest:
    """A graph to run on the emulator, arrays as `.npz`; answered by the output names."""

    binary: Path
    graph: str
    inputs: Path
    outputs: Path
    soc_model: int | None
