"""Compiled graphs on the HTP emulator, as parts for the host loop; they run in a child process."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from buildlib.encodings.grid import Grid
from buildlib.errors import ModelFileError
from buildlib.numerics.child import ChildProcess
from buildlib.numerics.runners import Arrays, Port, Ports, part_sizes
from buildlib.toolchains.base import GraphInfo, OpPackageLibrary, TensorInfo, Toolchain, emulated_s
from buildlib.toolchains.ort_qnn.wheel import find_libraries

_WORKER = "buildlib.numerics.emulator_worker"
_LOAD_S = 120.0


class EmulatedPart:
    """`PartRunner` of one compiled graph; its ports are those that the context binary declares."""

    def __init__(self, process: "EmulatorProcess", index: int, graph: GraphInfo) -> None:
        self._process = process
        self._index = index
        self.ports = Ports(
            {tensor.name: _port(tensor) for tensor in graph.inputs},
            {tensor.name: _port(tensor) for tensor in graph.outputs},
        )

    def run(self, feeds: Arrays) -> Arrays:
        """Return all outputs, as integers."""
        return self._process.request({"run": self._index}, feeds)[1]

    def close(self) -> None:
        """End the process that all parts share."""
        self._process.close()


def emulator_chains(
    binaries: Sequence[Path],
    toolchain: Toolchain,
    *,
    soc_model: int | None = None,
    cl: int | None = None,
    op_packages: Sequence[OpPackageLibrary] = (),
) -> dict[int, list[EmulatedPart]]:
    """Return chains for `HostLoop`, by AR, from context binaries built for the emulator.

    Args:
        binaries: one for each part, in the order of the parts.
        cl: context length of the graphs to take, if there are several.
        op_packages: for this host, with operations of the graphs.

    Raises:
        InputFileError: a file is no context binary.
        ModelFileError: a graph's inputs tell no AR.
        RunnerDiedError: the emulator cannot load them.
    """
    graphs: list[tuple[int, Path, GraphInfo]] = []
    for binary in binaries:
        graphs += [(ar, binary, graph) for ar, graph in _graphs(binary, toolchain, cl).items()]
    timeout_s = _LOAD_S + emulated_s(sum(path.stat().st_size for path in binaries), 1)
    process = EmulatorProcess(
        [(binary, graph.name) for _, binary, graph in graphs], soc_model, timeout_s, op_packages
    )
    chains: dict[int, list[EmulatedPart]] = {}
    for index, (ar, _, graph) in enumerate(graphs):
        chains.setdefault(ar, []).append(EmulatedPart(process, index, graph))
    return chains


def _graphs(binary: Path, toolchain: Toolchain, cl: int | None) -> dict[int, GraphInfo]:
    """Return the graphs of a binary by AR; a part without attention has one for all CLs."""
    graphs: dict[int, GraphInfo] = {}
    for graph in toolchain.inspect(binary).graphs:
        try:
            ar, own_cl = part_sizes({tensor.name: tensor.shape for tensor in graph.inputs})
        except ValueError as error:
            raise ModelFileError(binary, f"graph {graph.name}: {error}") from error
        if cl is None or own_cl in {None, cl}:
            graphs[ar] = graph
    return graphs


class EmulatorProcess(ChildProcess):
    """Child process with the graphs loaded, which runs one at a time on request."""

    def __init__(
        self,
        graphs: Sequence[tuple[Path, str]],
        soc_model: int | None,
        timeout_s: float,
        op_packages: Sequence[OpPackageLibrary] = (),
    ) -> None:
        subject = ", ".join(sorted({binary.name for binary, _ in graphs}))
        library_path = {"LD_LIBRARY_PATH": find_libraries().search_path}
        super().__init__(_WORKER, subject, timeout_s, library_path)
        header = {
            "graphs": [[str(binary.absolute()), name] for binary, name in graphs],
            "soc_model": soc_model,
            "op_packages": [[str(one.library), one.provider] for one in op_packages],
        }
        try:
            self.request(header, {})
        except BaseException:
            self.close()
            raise


def _port(tensor: TensorInfo) -> Port:
    dtype = np.dtype(tensor.dtype)
    encoding = tensor.encoding
    grid = None
    if encoding is not None and dtype.kind == "u":
        grid = Grid(dtype, (encoding.scale,), (-encoding.offset,))
    return Port(tensor.name, dtype, tensor.shape, grid)
