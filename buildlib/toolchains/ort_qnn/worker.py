"""Worker of `OrtQnnToolchain`: `python -m buildlib.toolchains.ort_qnn.worker COMMAND ANSWER`."""

import ctypes
import dataclasses
import mmap
import os
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from buildlib.error_base import one_line
from buildlib.toolchains.base import (
    BinaryInfo,
    GraphInfo,
    OpPackageLibrary,
    ScaleOffset,
    TensorInfo,
)
from buildlib.toolchains.child_process import Command, serve
from buildlib.toolchains.ort_qnn.stand_ins import put_stand_ins
from buildlib.toolchains.ort_qnn.wheel import WheelLibraries, find_libraries
from buildlib.toolchains.qnn import structures as qnn
from buildlib.toolchains.qnn.api import (
    Binary,
    FunctionTable,
    HtpSession,
    SystemFunction,
    load_system,
    raw_binary_info,
)
from buildlib.toolchains.qnn.composition import compile_operation, compose_binary
from buildlib.toolchains.qnn.refusal import RefusedError

if TYPE_CHECKING:
    from buildlib.toolchains.requests import (
        CompileRequest,
        ConvertRequest,
        ExecuteRequest,
        InspectRequest,
        OperationRequest,
        OpPackageRequest,
        ProfileRequest,
    )

_PROVIDER = "QNNExecutionProvider"
_GRAPH_INFO_VERSION = 3
_TENSOR_VERSIONS = (1, 2)
_MAX_GRAPHS = 4096
_MAX_TENSORS = 65536
_MAX_RANK = 16


def write_dlc(libraries: WheelLibraries, request: "ConvertRequest") -> Path:
    """Write the DLC of a QDQ model and return its path.

    ONNX Runtime names the graph by a hash of the model's path as given, so the model is opened by
    its bare name from its own folder: the DLC then does not depend on the location.
    """
    import onnxruntime as ort

    ort.register_execution_provider_library(
        _PROVIDER, str(libraries.folder / "libonnxruntime_providers_qnn.so")
    )
    device = next((d for d in ort.get_ep_devices() if d.ep_name == _PROVIDER), None)
    if device is None:
        raise RefusedError(f"{_PROVIDER} offers no device")
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    # Threads would keep a core busy while they wait for work, which conversion has not.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_provider_for_devices(
        [device],
        {
            "backend_path": str(libraries.htp),
            "soc_model": str(request.soc_model),
            "htp_arch": str(request.htp_arch),
            "offload_graph_io_quantization": "0",
            "dump_qnn_ir_dlc": "1",
            "dump_qnn_ir_dlc_dir": str(request.folder),
            "qnn_ir_backend_path": str(libraries.ir),
        },
    )
    os.chdir(request.onnx.parent)
    try:
        ort.InferenceSession(put_stand_ins(request.onnx) or request.onnx.name, options)
    except Exception as error:
        raise RefusedError(one_line(str(error), 500)) from error
    dlcs = sorted(request.folder.glob("*.dlc"))
    if len(dlcs) != 1:
        raise RefusedError(f"ONNX Runtime cut the model into {len(dlcs)} graphs instead of one")
    return dlcs[0]


def convert(body: bytes) -> object:
    """Convert ONNX to a DLC."""
    request: ConvertRequest = pickle.loads(body)  # noqa: S301 - of the parent
    return write_dlc(find_libraries(), request).name


def compile_(body: bytes) -> object:
    """Compile DLCs to a context binary, and describe it."""
    request: CompileRequest = pickle.loads(body)  # noqa: S301 - of the parent
    libraries = find_libraries()
    session, system = HtpSession(libraries.htp, request.soc_model), load_system(libraries.system)
    operations = register_op_packages(session, request.op_packages)
    compose_binary(session, system, request, operations)
    return describe(system, request.binary)


def inspect(body: bytes) -> object:
    """Describe a context binary."""
    request: InspectRequest = pickle.loads(body)  # noqa: S301 - of the parent
    return describe(load_system(find_libraries().system), request.binary)


def describe(system: FunctionTable, path: Path) -> dict[str, object]:
    """Return a `BinaryInfo` of a context binary, whose file is mapped and not read."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    binary = (ctypes.c_char * len(memory)).from_buffer(memory)
    return dataclasses.asdict(read_binary_info(system, binary))


def read_binary_info(system: FunctionTable, binary: Binary) -> BinaryInfo:
    """Read all that a context binary records about its graphs."""
    raw, handle = raw_binary_info(system, binary)
    graphs = tuple(_graph(raw.graphs[i]) for i in range(_within(raw.graph_count, _MAX_GRAPHS)))
    info = BinaryInfo(
        graphs=graphs,
        soc_model=raw.soc_model,
        dsp_arch=f"v{raw.context_info.contents.dsp_arch}" if raw.context_info else "",
        build_id=_text(raw.build_id),
        core_api_version=str(raw.core_api),
        backend_api_version=str(raw.backend_api),
        blob_version=str(raw.blob_version),
        size_bytes=len(binary),
    )
    system.call(SystemFunction.CONTEXT_FREE, handle)
    return info


def _graph(raw: qnn.GraphInfoV3) -> GraphInfo:
    if raw.version != _GRAPH_INFO_VERSION:
        raise RefusedError(f"its graphs have version {raw.version}, 3 is known")
    has_blob = raw.blob and raw.blob_size >= ctypes.sizeof(qnn.HtpGraphBlobInfo)
    blob = raw.blob.contents if has_blob else qnn.HtpGraphBlobInfo()
    return GraphInfo(
        name=_text(raw.name),
        inputs=_tensors(raw.inputs, raw.input_count),
        outputs=_tensors(raw.outputs, raw.output_count),
        vtcm_bytes=blob.vtcm_bytes,
        optimization_level=blob.optimization_level,
        spill_fill_bytes=blob.spill_fill_bytes,
    )


def _tensors(first: "ctypes._Pointer[qnn.QnnTensor]", count: int) -> tuple[TensorInfo, ...]:
    return tuple(_tensor(first[i]) for i in range(_within(count, _MAX_TENSORS)))


def _tensor(raw: qnn.QnnTensor) -> TensorInfo:
    if raw.version not in _TENSOR_VERSIONS:
        raise RefusedError(f"its tensors have version {raw.version}, 1 and 2 are known")
    shape = tuple(raw.dimensions[i] for i in range(_within(raw.rank, _MAX_RANK)))
    params = raw.quantize
    per_tensor = (
        params.definition == qnn.ENCODING_DEFINED and params.encoding == qnn.ENCODING_SCALE_OFFSET
    )
    return TensorInfo(
        name=_text(raw.name),
        shape=shape,
        dtype=qnn.DATA_TYPES.get(raw.data_type, f"unknown 0x{raw.data_type:04x}"),
        encoding=ScaleOffset(params.scale, params.offset) if per_tensor else None,
    )


def _within(count: int, limit: int) -> int:
    if count > limit:
        raise RefusedError(f"it claims to hold {count} parts where {limit} are plausible")
    return count


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")


def execute(body: bytes) -> object:
    """Run a graph on the emulator."""
    import numpy as np

    from buildlib.toolchains.qnn.execution import EmulatedGraph, keep_to_one_cpu  # loads NumPy

    keep_to_one_cpu()
    request: ExecuteRequest = pickle.loads(body)  # noqa: S301 - of the parent
    libraries = find_libraries()
    system = load_system(libraries.system)
    session = HtpSession(libraries.htp, request.soc_model)
    register_op_packages(session, request.op_packages)
    graph = EmulatedGraph(session, system, request.binary.read_bytes(), request.graph)
    with np.load(request.inputs, allow_pickle=False) as inputs:
        outputs = graph.run(dict(inputs))
    np.savez(request.outputs, **outputs)  # type: ignore[arg-type]
    return list(outputs)


def register_op_packages(
    session: HtpSession, packages: Iterable[OpPackageLibrary]
) -> frozenset[str]:
    """Register op packages in their order, and return the operations that they add."""
    before = set(session.operations())
    for package in packages:
        session.register_op_package(package.library, package.provider)
    return frozenset(session.operations()) - before


def profile(body: bytes) -> object:
    """Return the nodes of graphs, each with the least of its cycles."""
    from buildlib.toolchains.qnn.execution import EmulatedGraph, keep_to_one_cpu  # loads NumPy

    keep_to_one_cpu()
    request: ProfileRequest = pickle.loads(body)  # noqa: S301 - of the parent
    libraries = find_libraries()
    system, binary = load_system(libraries.system), request.binary.read_bytes()
    session = HtpSession(libraries.htp, request.soc_model)
    register_op_packages(session, request.op_packages)
    nodes = {}
    for name in request.graphs:
        graph = EmulatedGraph(session, system, binary, name)
        runs = [graph.node_cycles() for _ in range(request.repetitions)]
        nodes[name] = [
            (node, min(cycles for _, cycles in same))
            for (node, _), same in zip(runs[0], zip(*runs, strict=True), strict=True)
        ]
    return nodes


def op_package(body: bytes) -> object:
    """Register an op package and tell which operations the backend knows through it."""
    request: OpPackageRequest = pickle.loads(body)  # noqa: S301 - of the parent
    session = HtpSession(find_libraries().htp)
    return sorted(register_op_packages(session, [request.package]))


def operation(body: bytes) -> object:
    """Compile a graph of one operation of an op package."""
    request: OperationRequest = pickle.loads(body)  # noqa: S301 - of the parent
    return compile_operation(HtpSession(find_libraries().htp, request.soc_model), request)


def versions(_body: bytes) -> object:
    """Return the versions that the libraries report."""
    libraries = find_libraries()
    session = HtpSession(libraries.htp)
    backend = session.qnn.interface
    system = load_system(libraries.system).interface
    return {
        "qnn_build": session.build_id(),
        "qnn_core_api": str(backend.core_api),
        "qnn_htp_api": str(backend.backend_api),
        "qnn_system_api": str(system.api),
        "genie_api": _genie_version(libraries),
    }


def _genie_version(libraries: WheelLibraries) -> str:
    try:
        genie = ctypes.CDLL(str(libraries.genie))
        numbers = [
            int(getattr(genie, f"Genie_getApi{part}Version")())
            for part in ("Major", "Minor", "Patch")
        ]
    except (OSError, AttributeError) as error:
        raise RefusedError(
            f"{libraries.genie.name} does not report its version: {error}"
        ) from error
    return ".".join(str(number) for number in numbers)


COMMANDS: dict[str, Command] = {
    "convert": convert,
    "compile": compile_,
    "inspect": inspect,
    "execute": execute,
    "op_package": op_package,
    "profile": profile,
    "operation": operation,
    "versions": versions,
}

if __name__ == "__main__":
    serve(COMMANDS, sys.argv[1:])
