"""Which options the compiler of the `onnxruntime-qnn` wheel honours.

Tried with QNN 2.51: a verbose log of the compiler names each option that reaches it.
"""

from buildlib.errors import InvalidOptionError
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.htp_extensions import HtpGraphConfig
from buildlib.toolchains.ort_qnn.wheel import TOOLCHAIN

_NEEDS_SDK = f"toolchain {TOOLCHAIN} does not know it; it needs the QAIRT SDK's toolchain"
_EXTENDED_UDMA_ARCH = 81


def check_honoured(config: CompileConfig) -> None:
    """Raise on the first option that would be ignored, or refused late.

    Raises:
        InvalidOptionError: names the option, and who can do it.
    """
    for section in config.section_extras:
        raise InvalidOptionError(section, _NEEDS_SDK, ())
    for options in config.sections():
        for name in options.extras:
            raise InvalidOptionError(f"{options.SECTION}.{name}", _NEEDS_SDK, ())
    _check_context(config)
    for graph in config.graphs:
        _check_graph(config, graph)


def _check_context(config: CompileConfig) -> None:
    soc = config.target.soc
    if config.context.extended_udma and soc.htp_arch < _EXTENDED_UDMA_ARCH:
        reason = f"it needs Hexagon v{_EXTENDED_UDMA_ARCH}, and {soc.name} has {soc.dsp_arch}"
        raise InvalidOptionError("context.extended_udma", reason, ())
    if config.target.emulator and config.weight_sharing:
        reason = f"the emulator cannot run shared weights; build for {soc.name}"
        raise InvalidOptionError("context.weight_sharing_enabled", reason, ())


def _check_graph(config: CompileConfig, graph: HtpGraphConfig) -> None:
    soc = config.target.soc
    if (graph.vtcm_size_in_mb or 0) > soc.vtcm_mb:
        reason = f"{graph.vtcm_size_in_mb} MiB, and {soc.name} has {soc.vtcm_mb}"
        raise InvalidOptionError("graphs.vtcm_size_in_mb", reason, ())
    if graph.dlbc_weights and config.weight_sharing:
        reason = "shared weights are not compressed; set context.weight_sharing_enabled to false"
        raise InvalidOptionError("graphs.dlbc_weights", reason, ())
    if graph.fp16_relaxed_precision is False:
        reason = (
            f"toolchain {TOOLCHAIN} computes floats with 16 bits always; leave it out, or use the "
            "QAIRT SDK's toolchain"
        )
        raise InvalidOptionError("graphs.fp16_relaxed_precision", reason, ())
