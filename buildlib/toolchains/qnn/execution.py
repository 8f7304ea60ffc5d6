"""Execution of a graph of a context binary on the HTP emulator. For child processes only."""

import contextlib
import ctypes as c
import os
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from buildlib.toolchains.qnn import structures as qnn
from buildlib.toolchains.qnn.api import FunctionTable, HtpSession, raw_binary_info
from buildlib.toolchains.qnn.refusal import RefusedError

Arrays: TypeAlias = Mapping[str, npt.NDArray[np.generic]]


def keep_to_one_cpu() -> None:
    """Keep this process to the CPU that it is on, before it starts threads.

    The emulator computes in one thread, while ten others wait in `sched_yield`: on a CPU of their
    own they would be busy with that, and slow down other programs of the host.
    """
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {c.CDLL(None).sched_getcpu()})


class EmulatedGraph:
    """One graph of a context binary, loaded and ready to run any number of times.

    Arrays go in and out as stored: quantized tensors hold integers, not real numbers.
    """

    def __init__(
        self, session: HtpSession, system: FunctionTable, binary: bytes, name: str
    ) -> None:
        info, self._info_owner = raw_binary_info(system, binary)
        graphs = {info.graphs[i].name.decode(): info.graphs[i] for i in range(info.graph_count)}
        if name not in graphs:
            raise RefusedError(f"no graph {name!r} in the binary, only {', '.join(graphs)}")
        raw = graphs[name]
        self._session = session
        self._graph = session.graph(session.context_from_binary(binary), name)
        self._inputs = (qnn.QnnTensor * raw.input_count)(*raw.inputs[: raw.input_count])
        self._outputs = (qnn.QnnTensor * raw.output_count)(*raw.outputs[: raw.output_count])

    def run(self, inputs: Arrays) -> dict[str, npt.NDArray[np.generic]]:
        """Run the graph once."""
        return self._run(inputs, None)

    def node_cycles(self) -> list[tuple[str, int]]:
        """Run the graph once on real zeros, and return the emulator's cycles of each node."""
        zeros = {tensor.name.decode(): _zeros(tensor) for tensor in self._inputs}
        return self._session.node_cycles(lambda profile: self._run(zeros, profile))

    def _run(
        self, inputs: Arrays, profile: c.c_void_p | None
    ) -> dict[str, npt.NDArray[np.generic]]:
        arrays = [_bind(tensor, inputs) for tensor in self._inputs]
        outputs = {}
        for tensor in self._outputs:
            array = np.empty(_shape(tensor), _dtype(tensor))
            _point(tensor, array)
            outputs[tensor.name.decode()] = array
        self._session.execute(self._graph, self._inputs, self._outputs, profile)
        del arrays
        return outputs


def _bind(tensor: qnn.QnnTensor, arrays: Arrays) -> npt.NDArray[np.generic]:
    """Point a tensor at an array of its name; the caller keeps the array alive."""
    name, shape, dtype = tensor.name.decode(), _shape(tensor), _dtype(tensor)
    if name not in arrays:
        raise RefusedError(f"input {name} is missing")
    array = np.ascontiguousarray(arrays[name])
    if array.shape != shape or array.dtype != dtype:
        raise RefusedError(
            f"input {name} is {array.dtype}{array.shape}, the graph takes {dtype}{shape}"
        )
    _point(tensor, array)
    return array


def _point(tensor: qnn.QnnTensor, array: npt.NDArray[np.generic]) -> None:
    tensor.memory_type = qnn.MEMORY_RAW
    tensor.data = array.ctypes.data
    tensor.data_size = array.nbytes


def _zeros(tensor: qnn.QnnTensor) -> npt.NDArray[np.generic]:
    grid = tensor.quantize
    has_grid = (grid.definition, grid.encoding) == (qnn.ENCODING_DEFINED, qnn.ENCODING_SCALE_OFFSET)
    return np.full(_shape(tensor), -grid.offset if has_grid else 0, _dtype(tensor))


def _shape(tensor: qnn.QnnTensor) -> tuple[int, ...]:
    return tuple(tensor.dimensions[: tensor.rank])


def _dtype(tensor: qnn.QnnTensor) -> "np.dtype[np.generic]":
    return np.dtype(qnn.DATA_TYPES[tensor.data_type])
