"""ONNX to DLC by ONNX Runtime's QNN execution provider. For child processes only."""

import os
from pathlib import Path

from buildlib.toolchains.child import RefusedError
from buildlib.toolchains.ort_qnn.wheel import WheelLibraries

_PROVIDER = "QNNExecutionProvider"


def write_dlc(
    libraries: WheelLibraries, onnx: Path, folder: Path, *, soc_model: int, htp_arch: int
) -> Path:
    """Write the DLC of a QDQ model into an empty folder and return its path.

    ONNX Runtime makes the name of the graph from a hash of the model's path as it is given, so the
    model is opened by its bare name from its own folder: the DLC then does not depend on where
    that is.

    Raises:
        RefusedError: not all of the model runs on the tensor processor, or it is no model.
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
    options.add_provider_for_devices(
        [device],
        {
            "backend_path": str(libraries.htp),
            "soc_model": str(soc_model),
            "htp_arch": str(htp_arch),
            "offload_graph_io_quantization": "0",
            "dump_qnn_ir_dlc": "1",
            "dump_qnn_ir_dlc_dir": str(folder),
            "qnn_ir_backend_path": str(libraries.ir),
        },
    )
    os.chdir(onnx.parent)
    try:
        ort.InferenceSession(onnx.name, options)
    except Exception as error:
        raise RefusedError(_reason(error)) from error
    written = sorted(folder.glob("*.dlc"))
    if len(written) != 1:
        raise RefusedError(f"ONNX Runtime cut the model into {len(written)} graphs instead of one")
    return written[0]


def _reason(error: Exception) -> str:
    """ONNX Runtime's message without its source positions."""
    return " ".join(str(error).split())[:500]
