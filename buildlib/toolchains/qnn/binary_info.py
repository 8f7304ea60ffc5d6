"""Descriptions of context binaries, read by the system library. For child processes only."""

import ctypes as c

from buildlib.toolchains.base import BinaryInfo, GraphInfo, ScaleOffset, TensorInfo
from buildlib.toolchains.qnn import structures as qnn
from buildlib.toolchains.qnn.api import FunctionTable, SystemFunction, raw_binary_info
from buildlib.toolchains.qnn.refusal import RefusedError

_GRAPH_INFO_VERSION = 3
_TENSOR_VERSIONS = (1, 2)
_MAX_GRAPHS = 4096
_MAX_TENSORS = 65536
_MAX_RANK = 16


def read_binary_info(system: FunctionTable, binary: bytes) -> BinaryInfo:
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
    has_blob = raw.blob and raw.blob_size >= c.sizeof(qnn.HtpGraphBlobInfo)
    blob = raw.blob.contents if has_blob else qnn.HtpGraphBlobInfo()
    return GraphInfo(
        name=_text(raw.name),
        inputs=_tensors(raw.inputs, raw.input_count),
        outputs=_tensors(raw.outputs, raw.output_count),
        vtcm_bytes=blob.vtcm_bytes,
        optimization_level=blob.optimization_level,
        spill_fill_bytes=blob.spill_fill_bytes,
    )


def _tensors(first: "c._Pointer[qnn.QnnTensor]", count: int) -> tuple[TensorInfo, ...]:
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
