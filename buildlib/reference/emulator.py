"""Compiled graphs on the HTP emulator, as parts for the host loop.

The libraries abort the process on some errors, so they run in a child; if it dies or is silent, a
`RunnerDiedError` carries the end of its log.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from buildlib.encodings.grid import Grid
from buildlib.errors import ModelFileError, RunnerDiedError
from buildlib.reference.frames import BrokenFrameError, read_frame, write_frame
from buildlib.reference.runners import Arrays, Port, Ports, part_sizes
from buildlib.toolchains.base import GraphInfo, TensorInfo, Toolchain
from buildlib.toolchains.ort_qnn.wheel import find_libraries

_WORKER = "buildlib.reference.emulator_worker"
_TAIL_BYTES = 4096


class EmulatedPart:
    """`PartRunner` of one compiled graph."""

    def __init__(self, process: "EmulatorProcess", index: int, graph: GraphInfo) -> None:
        self._process = process
        self._index = index
        self._ports = ports_of(graph)

    @property
    def ports(self) -> Ports:
        """The ports that the context binary declares."""
        return self._ports

    def run(self, feeds: Arrays) -> Arrays:
        """Return all outputs, as integers.

        Raises:
            RunnerDiedError: the emulator refused, died, or took too long.
        """
        return self._process.run(self._index, feeds)

    def close(self) -> None:
        """End the process that all parts share."""
        self._process.close()


def emulator_chains(
    binaries: Sequence[Path],
    toolchain: Toolchain,
    *,
    soc_model: int | None = None,
    cl: int | None = None,
    timeout_s: float = 120.0,
) -> dict[int, list[EmulatedPart]]:
    """Return chains for `HostLoop`, by AR, from context binaries built for the emulator.

    Args:
        binaries: one for each part, in the order of the parts.
        toolchain: describes their graphs.
        soc_model: the SoC to emulate; by default the library's choice.
        cl: context length of the graphs to take, if there are several.
        timeout_s: for loading, and for each call of a graph.

    Raises:
        InvalidBinaryError: a file is no context binary.
        ModelFileError: a graph's inputs tell no AR.
        RunnerDiedError: the emulator cannot load them.
    """
    found: list[tuple[int, Path, GraphInfo]] = []
    for binary in binaries:
        found += [(ar, binary, graph) for ar, graph in _graphs(binary, toolchain, cl).items()]
    process = EmulatorProcess(
        [(binary, graph.name) for _, binary, graph in found], soc_model, timeout_s
    )
    chains: dict[int, list[EmulatedPart]] = {}
    for index, (ar, _, graph) in enumerate(found):
        chains.setdefault(ar, []).append(EmulatedPart(process, index, graph))
    return chains


def _graphs(binary: Path, toolchain: Toolchain, cl: int | None) -> dict[int, GraphInfo]:
    """Return the graphs of a binary by AR; a part without attention has one for all CLs."""
    found: dict[int, GraphInfo] = {}
    for graph in toolchain.inspect(binary).graphs:
        try:
            ar, own_cl = part_sizes({tensor.name: tensor.shape for tensor in graph.inputs})
        except ValueError as error:
            raise ModelFileError(binary, f"graph {graph.name}: {error}") from error
        if cl is None or own_cl in {None, cl}:
            found[ar] = graph
    return found


def ports_of(graph: GraphInfo) -> Ports:
    """Return the ports of a compiled graph."""
    return Ports(
        {tensor.name: _port(tensor) for tensor in graph.inputs},
        {tensor.name: _port(tensor) for tensor in graph.outputs},
    )


class EmulatorProcess:
    """Child process with the graphs loaded, which runs one at a time on request."""

    def __init__(
        self, graphs: Sequence[tuple[Path, str]], soc_model: int | None, timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._subject = ", ".join(sorted({binary.name for binary, _ in graphs}))
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"LD_LIBRARY_PATH": find_libraries().search_path},
            start_new_session=True,
        )
        header: dict[str, object] = {
            "graphs": [[str(binary.absolute()), name] for binary, name in graphs],
            "soc_model": soc_model,
        }
        try:
            self._request(header, {})
        except BaseException:
            self.close()
            raise

    def run(self, index: int, feeds: Arrays) -> Arrays:
        """Run graph `index` of those loaded."""
        return self._request({"run": index}, feeds)

    def close(self) -> None:
        """Kill the child: it has nothing to save, and its libraries may crash on a clean exit."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._log.close()

    def _request(self, header: dict[str, object], arrays: Arrays) -> Arrays:
        stdin, stdout = self._child.stdin, self._child.stdout
        if stdin is None or stdout is None or stdin.closed:
            raise RunnerDiedError(self._subject, "it was closed", "")
        try:
            write_frame(stdin.fileno(), header, arrays)
            answer, results = read_frame(stdout.fileno(), self._timeout_s)
        except (BrokenFrameError, OSError) as error:
            raise self._death_error(str(error)) from error
        if "error" in answer:
            raise RunnerDiedError(self._subject, str(answer["error"])[:300], "")
        return results

    def _death_error(self, reason: str) -> RunnerDiedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._child.wait(1.0)
            reason = f"{reason} (exit status {status})"
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        tail = self._log.read().decode(errors="replace")
        self.close()
        return RunnerDiedError(self._subject, reason, tail)


def _port(tensor: TensorInfo) -> Port:
    dtype = np.dtype(tensor.dtype)
    encoding = tensor.encoding
    grid = None
    if encoding is not None and dtype.kind == "u":
        grid = Grid(dtype, (encoding.scale,), (-encoding.offset,))
    return Port(tensor.name, dtype, tensor.shape, grid)
