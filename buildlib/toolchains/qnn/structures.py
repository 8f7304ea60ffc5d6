"""Structures and constants of the QNN C API, core version 2, on 64-bit Linux.

Only fields that this project reads or writes are named. Padding covers the rest, so that every size
is that of the library.
"""

import ctypes as c
from typing import Final

CONFIG_CUSTOM: Final = 0
"""`option` of a device, context or graph configuration that points to one of the backend's own."""

HTP_DEVICE_SOC: Final = 0
HTP_CONTEXT_WEIGHT_SHARING: Final = 1
HTP_CONTEXT_EXTENDED_UDMA: Final = 11
HTP_CONTEXT_LORA_WEIGHT_SHARING: Final = 13
HTP_GRAPH_OPTIMIZATION: Final = 1
HTP_GRAPH_VTCM_SIZE: Final = 3
HTP_GRAPH_HVX_THREADS: Final = 6
HTP_OPTIMIZATION_FINALIZE_FLAG: Final = 3
HTP_OPTIMIZATION_DLBC: Final = 4
HTP_OPTIMIZATION_DLBC_WEIGHTS: Final = 5

ENCODING_DEFINED: Final = 1
ENCODING_SCALE_OFFSET: Final = 0
UNDEFINED: Final = 0x7FFFFFFF

TENSOR_INPUT: Final = 0
TENSOR_OUTPUT: Final = 1

MEMORY_RAW: Final = 0

PROFILE_DETAILED: Final = 2
PROFILE_NODE: Final = 404
PROFILE_CYCLES: Final = 3
"""`type` and `unit` of the event of one node, as QNN 2.51 gives them."""

DATA_TYPES: Final = {
    0x0008: "int8",
    0x0016: "int16",
    0x0032: "int32",
    0x0064: "int64",
    0x0108: "uint8",
    0x0116: "uint16",
    0x0132: "uint32",
    0x0164: "uint64",
    0x0216: "float16",
    0x0232: "float32",
    0x0264: "float64",
    0x0304: "int4",
    0x0308: "int8",
    0x0316: "int16",
    0x0332: "int32",
    0x0404: "uint4",
    0x0408: "uint8",
    0x0416: "uint16",
    0x0432: "uint32",
    0x0508: "bool",
}
"""NumPy's names of stored types; fixed-point types have the name of their integers."""


class QnnVersion(c.Structure):
    """Three numbers."""

    _fields_ = (("major", c.c_uint32), ("minor", c.c_uint32), ("patch", c.c_uint32))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class BackendInterfaceHeader(c.Structure):
    """Header of a backend's function table."""

    _fields_ = (
        ("backend_id", c.c_uint32),
        ("name", c.c_char_p),
        ("core_api", QnnVersion),
        ("backend_api", QnnVersion),
    )


class SystemInterfaceHeader(c.Structure):
    """Header of the system library's function table."""

    _fields_ = (("backend_id", c.c_uint32), ("name", c.c_char_p), ("api", QnnVersion))


class OperationName(c.Structure):
    """An operation that a backend knows."""

    _fields_ = (("package", c.c_char_p), ("operation", c.c_char_p), ("target", c.c_char_p))


class ProfileEvent(c.Structure):
    """An event of a profile: `QnnProfile_EventData_t` of the public API reference, 80-63442-10."""

    _fields_ = (
        ("type", c.c_uint32),
        ("unit", c.c_uint32),
        ("value", c.c_uint64),
        ("identifier", c.c_char_p),
    )


class QnnConfig(c.Structure):
    """A device, context or graph configuration with content of the backend's own."""

    _fields_ = (("option", c.c_uint32), ("custom", c.c_void_p), ("_rest", c.c_uint64 * 4))


class HtpCustomConfig(c.Structure):
    """A configuration of the HTP backend: an option, and up to two 32-bit values for it."""

    _fields_ = (
        ("option", c.c_uint32),
        ("_pad", c.c_uint32),
        ("value", c.c_uint32),
        ("second", c.c_float),
        ("_rest", c.c_uint64 * 6),
    )


class QuantizeParams(c.Structure):
    """Quantization of a tensor; `scale` and `offset` hold for `ENCODING_SCALE_OFFSET` alone."""

    _fields_ = (
        ("definition", c.c_uint32),
        ("encoding", c.c_uint32),
        ("scale", c.c_float),
        ("offset", c.c_int32),
        ("_rest", c.c_uint64 * 3),
    )


class QnnTensor(c.Structure):
    """A graph's input or output: version 2 and its version; version 1 is its beginning."""

    _fields_ = (
        ("version", c.c_uint32),
        ("_version_pad", c.c_uint32),
        ("id", c.c_uint32),
        ("name", c.c_char_p),
        ("type", c.c_uint32),
        ("data_format", c.c_uint32),
        ("data_type", c.c_uint32),
        ("quantize", QuantizeParams),
        ("rank", c.c_uint32),
        ("dimensions", c.POINTER(c.c_uint32)),
        ("memory_type", c.c_uint32),
        ("data", c.c_void_p),
        ("data_size", c.c_uint32),
        ("dynamic_dimensions", c.c_void_p),
        ("_sparse", c.c_uint32 * 3),
        ("_produced", c.c_uint32),
    )


class OperationConfig(c.Structure):
    """A node of a graph, version 1 with its version before it."""

    _fields_ = (
        ("version", c.c_uint32),
        ("name", c.c_char_p),
        ("package", c.c_char_p),
        ("operation", c.c_char_p),
        ("parameter_count", c.c_uint32),
        ("parameters", c.c_void_p),
        ("input_count", c.c_uint32),
        ("inputs", c.POINTER(QnnTensor)),
        ("output_count", c.c_uint32),
        ("outputs", c.POINTER(QnnTensor)),
    )


class HtpGraphBlobInfo(c.Structure):
    """The HTP backend's record of a graph."""

    _fields_ = (
        ("version", c.c_uint32),
        ("spill_fill_bytes", c.c_uint64),
        ("vtcm_bytes", c.c_uint32),
        ("optimization_level", c.c_uint32),
    )


class GraphInfoV3(c.Structure):
    """A graph of a context binary, version 3 with its version before it."""

    _fields_ = (
        ("version", c.c_uint32),
        ("name", c.c_char_p),
        ("input_count", c.c_uint32),
        ("inputs", c.POINTER(QnnTensor)),
        ("output_count", c.c_uint32),
        ("outputs", c.POINTER(QnnTensor)),
        ("updatable_count", c.c_uint32),
        ("updatable", c.POINTER(QnnTensor)),
        ("blob_size", c.c_uint32),
        ("blob", c.POINTER(HtpGraphBlobInfo)),
        ("_rest", c.c_uint64),
    )


class HtpContextBlobInfo(c.Structure):
    """The HTP backend's record of a context, which starts with the Hexagon architecture."""

    _fields_ = (("version", c.c_uint32), ("dsp_arch", c.c_uint32))


class BinaryInfoV3(c.Structure):
    """A context binary, version 3 with its version before it."""

    _fields_ = (
        ("version", c.c_uint32),
        ("_version_pad", c.c_uint32),
        ("backend_id", c.c_uint32),
        ("build_id", c.c_char_p),
        ("core_api", QnnVersion),
        ("backend_api", QnnVersion),
        ("soc_version", c.c_char_p),
        ("blob_version", QnnVersion),
        ("blob_size", c.c_uint64),
        ("tensor_count", c.c_uint32),
        ("tensors", c.POINTER(QnnTensor)),
        ("graph_count", c.c_uint32),
        ("graphs", c.POINTER(GraphInfoV3)),
        ("hardware_info", c.c_void_p),
        ("hardware_info_size", c.c_uint32),
        ("context_info", c.POINTER(HtpContextBlobInfo)),
        ("soc_model", c.c_uint32),
    )
