"""Cost of each operator of a container: cycles, bytes of weights, loss of quantization.

The compiler cuts an operator of the model into heads, columns and conversions; their names begin
with its own, and they count together. Cycles are those of a device, or else of the emulator on this
host, which say nothing about a DSP; the number of compiled nodes, the bytes and the loss are the
container's.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.builder.model_folder import load_factors
from buildlib.cache.records import read_files
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.container.container import GenAIContainer
from buildlib.container.op_packages import registrations
from buildlib.errors import CacheError
from buildlib.graph.files import load_model, tensor_array
from buildlib.quantize.techniques.spreading import describe_spreading
from buildlib.replay import compiled_from, emulator_twin, entry_beside
from buildlib.targets import parse_target
from buildlib.toolchains.base import NodeCycles, OpPackageLibrary
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

_NUMBER = re.compile(r":?OpId_\d+(?: \(cycles\))?$")
_CUT = re.compile(r"(?:_head_\d+|_(?:columns|rows)_\d+_\d+|_dq(?:_\d+)?|_q|_flat)$")
_PART = re.compile(r"_\d+_of_\d+$")
_WEIGHT = re.compile(r"(.*?)(?:_rows_(\d+)_(\d+))?_q")
_UNNAMED = "(no name)"
_NIBBLE = 4  # bits


@dataclass
class OperatorCost:
    """One operator of a graph.

    Attributes:
        nodes: that it was compiled into.
        cycles: of all of them.
        weight_bytes: as stored in the DLC; 0 where it has none.
        signal, noise: sums of squares, of its float weights and of their change by quantization.
    """

    nodes: int = 0
    cycles: int = 0
    weight_bytes: int = 0
    signal: float = field(default=0.0, repr=False)
    noise: float = field(default=0.0, repr=False)

    @property
    def sqnr_db(self) -> float | None:
        """Signal to noise of its quantized weights; None without, infinite where they are equal."""
        if not self.signal:
            return None
        return float("inf") if not self.noise else 10 * float(np.log10(self.signal / self.noise))

    def add(self, other: "OperatorCost") -> None:
        """Count another one with it."""
        self.nodes += other.nodes
        self.cycles += other.cycles
        self.weight_bytes += other.weight_bytes
        self.signal += other.signal
        self.noise += other.noise


Costs = Mapping[str, OperatorCost]
"""Costs by the name of the operator, in the order of the graph."""


def operator_name(node: str) -> str:
    """Return the operator of the model that a compiled node belongs to.

    `layer_0_q_proj_columns_24_48:OpId_29 (cycles)` is of `layer_0_q_proj`.
    """
    name = _NUMBER.sub("", node).strip()
    while (shorter := _CUT.sub("", name)) != name:
        name = shorter
    return name or _UNNAMED


def operator_costs(
    container: GenAIContainer, cycles: NodeCycles, *, cache_root: Path
) -> tuple[dict[str, Costs], str]:
    """Return the costs of all graphs, parts together, by `ar1_cl4096`.

    Returns:
        The costs, and why weights are not counted; empty if they are.

    """
    costs, problem = dict[str, dict[str, OperatorCost]](), ""
    for graph, nodes in cycles.items():
        table = costs.setdefault(_PART.sub("", graph), {})
        for node, count in nodes:
            one = table.setdefault(operator_name(node), OperatorCost())
            one.add(OperatorCost(nodes=1, cycles=count))
    for name in container.genie_config.ctx_bins:
        try:
            weights = list(_weights(cache_root, name, container.metadata.files[name].sha256))
        except CacheError as error:
            problem = str(error)
            continue
        for graph, node, cost in weights:
            table = costs[_PART.sub("", graph)]
            table.setdefault(operator_name(node), OperatorCost()).add(cost)
    return dict(costs), problem


def emulator_cycles(
    container: GenAIContainer, *, cache_root: Path, repetitions: int = 3
) -> NodeCycles:
    """Return the emulator's cycles of all graphs; a phone's container is made again for it."""
    soc_model = parse_target(container.metadata.target.name).soc.soc_model
    toolchain, cycles = OrtQnnToolchain(), dict[str, Sequence[tuple[str, int]]]()
    with tempfile.TemporaryDirectory(prefix="qnnfarm-profile-") as scratch:
        twin = container
        if not container.metadata.target.emulator:
            twin = emulator_twin(container, Path(scratch) / "twin", cache_root=cache_root)
        packages = [
            OpPackageLibrary(twin.path / one.file, one.provider)
            for one in registrations(twin.metadata.op_packages)
        ]
        for name in container.genie_config.ctx_bins:
            binary = twin.files[name]
            graphs = [graph.name for graph in toolchain.inspect(binary).graphs]
            cycles |= toolchain.profile(
                binary,
                graphs,
                soc_model=soc_model,
                repetitions=repetitions,
                op_packages=packages,
            )
    return cycles


def total_by_layer(costs: Costs) -> dict[str, OperatorCost]:
    """Sum operators of one layer."""
    return _grouped(costs, re.compile(r"^(layer_\d+)_.*"))


def total_by_kind(costs: Costs) -> dict[str, OperatorCost]:
    """Sum the same operator of all layers."""
    return _grouped(costs, re.compile(r"^layer_\d+_(.*)"))


def _grouped(costs: Costs, name: re.Pattern[str]) -> dict[str, OperatorCost]:
    groups: dict[str, OperatorCost] = {}
    for operator, cost in costs.items():
        groups.setdefault(name.sub(r"\1", operator), OperatorCost()).add(cost)
    return groups


def _weights(root: Path, name: str, sha256: str) -> Iterator[tuple[str, str, OperatorCost]]:
    """Yield graph, node and cost of each quantized weight that a binary was compiled from."""
    for folder in compiled_from(root, name, sha256):
        floats = _float_weights(folder)
        for part in sorted(folder.glob("*.qdq.onnx")):
            names = set()
            for node in load_model(part).graph:
                for value in node.inputs:
                    integers = _stored(value)
                    if value is None or integers is None or integers.name in names:
                        continue
                    names.add(integers.name)
                    cost = OperatorCost(weight_bytes=_bytes(integers))
                    exact = floats(str(integers.name))
                    if exact is not None:
                        real = _dequantized(value)
                        cost.signal = float(np.square(exact, dtype=np.float64).sum())
                        cost.noise = float(np.square(exact - real, dtype=np.float64).sum())
                    yield part.name.removesuffix(".qdq.onnx"), node.name or "", cost


def _float_weights(converted: Path) -> Callable[[str], npt.NDArray[np.float32] | None]:
    """Return a function that gives the float weight of quantized integers by their name.

    It is that of the model before its weights were optimized for quantization, but with the
    channels that it has.
    """
    folder = entry_beside(converted, read_files(converted).sources[0]).folder
    factors = load_factors(folder)
    while not (folder.name.startswith("optimize_") and describe_spreading(folder / MODEL_FILE)):
        factors = factors or load_factors(folder)
        try:
            folder = entry_beside(folder, read_files(folder).sources[0]).folder
        except CacheError:  # the first stage read the user's files
            break
    else:
        factors = {}  # the weights have them
    values = load_model(folder / MODEL_FILE).graph.initializers

    def find(name: str) -> npt.NDArray[np.float32] | None:
        parts = _WEIGHT.fullmatch(name)
        value = None if parts is None else values.get(parts[1])
        if parts is None or value is None or value.const_value is None:
            return None
        whole = _numpy(value) * factors.get(parts[1], np.float32(1.0))
        return whole if parts[2] is None else whole[int(parts[2]) : int(parts[3])]

    return find


def _bytes(stored: ir.Value) -> int:
    bits = 0 if stored.dtype is None else int(stored.dtype.bitwidth)
    return 0 if stored.const_value is None else (stored.const_value.size * bits + 7) // 8


def _stored(value: ir.Value | None) -> ir.Value | None:
    """Return the integers that a constant real value is dequantized from."""
    maker = None if value is None else value.producer()
    if maker is None or maker.op_type != "DequantizeLinear":
        return None
    integers = maker.inputs[0]
    return integers if integers is not None and integers.const_value is not None else None


def _numpy(value: ir.Value) -> npt.NDArray[np.float32]:
    if value.const_value is None:
        raise ValueError(f"{value.name} is no constant")
    tensor = value.const_value
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth != _NIBBLE:
        return np.asarray(tensor_array(tensor), np.float32)
    # Two values a byte, the lower half first, as ONNX stores them.
    data = np.memmap(
        tensor.path, np.uint8, mode="r", offset=tensor.offset or 0, shape=(tensor.size + 1) // 2
    )
    values = np.stack((data & 0xF, data >> _NIBBLE), axis=1).reshape(-1)[: tensor.size]
    numbers = values.astype(np.int16)
    if tensor.dtype == ir.DataType.INT4:
        numbers = (numbers ^ 8) - 8
    return numbers.reshape(tensor.shape.numpy()).astype(np.float32)


def _dequantized(value: ir.Value) -> npt.NDArray[np.float32]:
    """Compute a constant behind `DequantizeLinear`; its scales may be dequantized, too."""
    maker = value.producer()
    if maker is None:
        return _numpy(value)
    tensor, scale = maker.inputs[0], maker.inputs[1]
    if tensor is None or scale is None:
        raise ValueError(f"{value.name} has no scale")
    integers, scales = _numpy(tensor), _dequantized(scale)
    zero = maker.inputs[2] if len(maker.inputs) > 2 and maker.inputs[2] is not None else None
    zeros = np.zeros_like(scales) if zero is None else _numpy(zero)
    axis = maker.attributes.get_int("axis", 1) % max(1, integers.ndim)
    block = maker.attributes.get_int("block_size", 0)
    if block:
        scales, zeros = (np.repeat(array, block, axis) for array in (scales, zeros))
    elif scales.ndim == 1 and integers.ndim > 1:
        view = [-1 if dim == axis else 1 for dim in range(integers.ndim)]
        scales, zeros = scales.reshape(view), zeros.reshape(view)
    return ((integers - zeros) * scales).astype(np.float32)
