"""Toolchain of the `onnxruntime-qnn` wheel: the real QNN compiler and emulator, without an SDK.

ONNX Runtime writes the DLCs. The context binary is made from them through the QNN C API, so that
all graphs of a part share one binary, in one step, under names that we choose.
"""

import functools
import pickle
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from buildlib.errors import (
    InputFileError,
    InvalidOptionError,
    ToolchainError,
    ToolchainTimeoutError,
)
from buildlib.files import atomic_path, sync_file
from buildlib.targets import Target
from buildlib.toolchains.base import BinaryInfo, GraphPorts, OpPackageLibrary, TensorInfo
from buildlib.toolchains.child_process import Step, run_step
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.htp_extensions import HtpGraphConfig, profile_fault
from buildlib.toolchains.ort_qnn.wheel import TOOLCHAIN, WheelLibraries, find_libraries
from buildlib.toolchains.requests import (
    CompileRequest,
    ConvertRequest,
    ExecuteRequest,
    GraphRequest,
    InspectRequest,
    OperationRequest,
    OpPackageRequest,
    ProfileRequest,
)

_WORKER = "buildlib.toolchains.ort_qnn.worker"
_COMPILER = "`--toolchain qairt`"
"""Another, in messages of what this one cannot do."""
_NEEDS_SDK = f"toolchain {TOOLCHAIN} does not know it; {_COMPILER} passes it to the SDK's compiler"
_OF_THE_SDK = (
    "num_cores",
    "weights_packing",
    "short_depth_conv_on_hmx_off",
    "fold_relu_activation_into_conv_off",
    "advanced_activation_fusion",
    "monolithic_lstm",
)
"""Options of graphs that the toolchain does not hand to the compiler."""
_EXTENDED_UDMA_ARCH = 81
_UNSUPPORTED = re.compile(r"Unsupported nodes in QNN EP: (.*)")
_NODE = re.compile(r"\{ name: (.*?), type: (\S+) \}")
_MAX_LOG_BYTES = 64 * 1024 * 1024
_MAX_KINDS = 5
_TIMEOUTS_S = {
    "convert": 1800.0,
    "compile": 7200.0,
    "operation": 7200.0,
    "inspect": 60.0,
    "op_package": 60.0,
    "versions": 60.0,
    "execute": 600.0,
    "profile": 600.0,
}
"""Seconds that each step may take before it counts as hung."""


@dataclass(frozen=True)
class OrtQnnToolchain:
    """`Toolchain` on the `onnxruntime-qnn` wheel.

    Attributes:
        log_dir: keeps the log of every step; by default only logs of failed steps are kept, in the
            temporary folder.
    """

    log_dir: Path | None = None

    @property
    def name(self) -> str:
        """Stable name for metadata and cache keys."""
        return TOOLCHAIN

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the wheels and, as the libraries report them, of QNN and Genie."""
        from importlib.metadata import version

        libraries = find_libraries()
        return {
            "toolchain": TOOLCHAIN,
            "onnxruntime": version("onnxruntime"),
            "onnxruntime_qnn": libraries.version,
            **_reported_versions(libraries, self.log_dir),
        }

    def check(self, config: CompileConfig) -> None:
        """Refuse options that the compiler of the wheel does not honour."""
        check_options(config)

    def convert(self, onnx: Path, dlc: Path, target: Target) -> None:
        """Convert QDQ ONNX to a DLC. A time stamp makes its bytes differ from run to run."""
        with tempfile.TemporaryDirectory(prefix=f".{dlc.name}.", dir=dlc.parent) as scratch:
            request = ConvertRequest(
                onnx.absolute(),
                Path(scratch).absolute(),
                target.soc.soc_model,
                target.soc.htp_arch,
            )
            try:
                name = self._run("convert", onnx, request)
            except ToolchainError as error:
                raise diagnose(error) from error
            scratch_dlc = Path(scratch) / str(name)
            scratch_dlc.chmod(dlc.parent.stat().st_mode & 0o666)  # its writer asks no umask
            sync_file(scratch_dlc)
            scratch_dlc.replace(dlc)

    def compile(
        self,
        dlcs: Sequence[Path],
        binary: Path,
        config: CompileConfig,
        op_packages: Sequence[OpPackageLibrary] = (),
        ports: Mapping[str, GraphPorts] | None = None,
    ) -> BinaryInfo:
        """Compile DLCs of one graph each to one context binary. Equal inputs give equal bytes."""
        stems = [dlc.stem for dlc in dlcs]
        if not stems or len(set(stems)) != len(stems):
            raise ValueError(f"graphs are named by the stems of their DLCs, which are {stems}")
        self.check(config)
        with atomic_path(binary.absolute()) as unfinished:
            request = _compile_request(dlcs, unfinished, config, op_packages, ports or {})
            described = self._run("compile", binary, request)
        return TypeAdapter(BinaryInfo).validate_python(described)

    def inspect(self, binary: Path) -> BinaryInfo:
        """Describe a context binary."""
        request = InspectRequest(binary.absolute())
        try:
            described = self._run("inspect", binary, request)
            return TypeAdapter(BinaryInfo).validate_python(described)
        except ToolchainTimeoutError:
            raise
        except ToolchainError as error:
            if self.log_dir is None:
                Path(error.log_path).unlink(missing_ok=True)
            reason = f"it is no readable context binary: {error.reason}"
            raise InputFileError(str(binary), reason) from error
        except ValidationError as error:
            reason = "its description as a context binary makes no sense"
            raise InputFileError(str(binary), reason) from error

    def execute(
        self,
        binary: Path,
        graph: str,
        inputs: Mapping[str, npt.NDArray[np.generic]],
        *,
        soc_model: int | None = None,
        op_packages: Sequence[OpPackageLibrary] = (),
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Run one graph of an unshared context binary once on the HTP emulator.

        Args:
            binary: built for an emulator target.
            inputs: arrays as stored: integers of quantized tensors.
            soc_model: model of the emulated SoC; by default the library's choice.
            op_packages: those for this host, with operations of the graph.

        Raises:
            ToolchainMissingError: the wheel is not usable here.
            ToolchainError: the inputs do not fit, or the emulator refuses the binary or died.
        """
        with tempfile.TemporaryDirectory(prefix="qnnfarm-execute-") as scratch:
            inputs_file, outputs_file = Path(scratch) / "inputs.npz", Path(scratch) / "outputs.npz"
            np.savez(inputs_file, **inputs)  # type: ignore[arg-type]
            packages = tuple(op_packages)
            request = ExecuteRequest(
                binary.absolute(), graph, inputs_file, outputs_file, soc_model, packages
            )
            self._run("execute", binary, request)
            with np.load(outputs_file, allow_pickle=False) as outputs:
                return dict(outputs)

    def profile(
        self,
        binary: Path,
        graphs: Sequence[str],
        *,
        soc_model: int,
        repetitions: int = 1,
        op_packages: Sequence[OpPackageLibrary] = (),
    ) -> dict[str, tuple[tuple[str, int], ...]]:
        """Return the compiled nodes of graphs, by name, and the emulator's cycles of each.

        The cycles are the host's, and other work on it makes them more: the least of several
        repetitions is taken. They say nothing about a DSP.
        """
        request = ProfileRequest(
            binary.absolute(), tuple(graphs), soc_model, repetitions, tuple(op_packages)
        )
        answer = self._run("profile", binary, request, max(1, repetitions) * max(1, len(graphs)))
        return TypeAdapter(dict[str, tuple[tuple[str, int], ...]]).validate_python(answer)

    def op_package(self, package: OpPackageLibrary) -> tuple[str, ...]:
        """Return the operations that an op package for this host adds, e.g. `my.package::Scale`."""
        request = OpPackageRequest(package)
        return tuple(self._run("op_package", package.library, request))

    def compile_operation(
        self,
        package: OpPackageLibrary,
        operation: str,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        binary: Path,
        soc_model: int,
    ) -> None:
        """Compile a graph of one operation of an op package, which is named after the operation.

        Args:
            operation: as `op_package` names it.
            inputs: of the node and of the graph.
            soc_model: model of the SoC to compile for.
        """
        with atomic_path(binary.absolute()) as unfinished:
            request = OperationRequest(
                package, operation, tuple(inputs), tuple(outputs), unfinished, soc_model
            )
            self._run("operation", package.library, request)

    def _run(self, command: str, subject: Path, request: object, times: int = 1) -> Any:  # noqa: ANN401 - JSON
        timeout_s = times * _TIMEOUTS_S[command]
        step = Step(_WORKER, command, subject, timeout_s, find_libraries().search_path)
        return run_step(step, pickle.dumps(request), self.log_dir)


@functools.cache  # every build asks, and the libraries of a process stay the same
def _reported_versions(libraries: WheelLibraries, log_dir: Path | None) -> dict[str, str]:
    timeout_s = _TIMEOUTS_S["versions"]
    step = Step(_WORKER, "versions", libraries.folder, timeout_s, libraries.search_path)
    return TypeAdapter(dict[str, str]).validate_python(run_step(step, b"", log_dir))


def _compile_request(
    dlcs: Sequence[Path],
    binary: Path,
    config: CompileConfig,
    op_packages: Sequence[OpPackageLibrary],
    ports: Mapping[str, GraphPorts],
) -> CompileRequest:
    return CompileRequest(
        graphs=tuple(_graph_request(dlc, config, ports.get(dlc.stem)) for dlc in dlcs),
        binary=binary,
        soc_model=config.target.soc.soc_model,
        weight_sharing=config.weight_sharing,
        lora_weight_sharing=config.context.lora_weight_sharing,
        extended_udma=config.context.extended_udma,
        op_packages=tuple(op_packages),
    )


def _graph_request(dlc: Path, config: CompileConfig, ports: GraphPorts | None) -> GraphRequest:
    options = config.graph(dlc.stem)
    return GraphRequest(
        dlc=dlc.absolute(),
        vtcm_mb=options.vtcm_size_in_mb or config.target.soc.vtcm_mb,
        optimization_level=options.optimization_type or 3,
        hvx_threads=options.hvx_threads,
        dlbc=options.dlbc,
        dlbc_weights=options.dlbc_weights,
        ports=ports,
    )


def check_options(config: CompileConfig) -> None:
    """Raise on the first option that the compiler would ignore, or refuse late.

    Tried with QNN 2.51: a verbose log of the compiler names each option that reaches it.
    """
    for section in config.section_extras:
        raise InvalidOptionError(section, _NEEDS_SDK, ())
    for options in config.sections():
        for name in options.extras:
            raise InvalidOptionError(f"{options.SECTION}.{name}", _NEEDS_SDK, ())
    check_target(config)
    for graph in config.graphs:
        for name in _OF_THE_SDK:
            if getattr(graph, name) is not None:
                raise InvalidOptionError(f"graphs.{name}", _NEEDS_SDK, ())
        if graph.fp16_relaxed_precision is False:
            reason = (
                f"toolchain {TOOLCHAIN} always computes floats with 16 bits; leave it out, or use "
                f"{_COMPILER}"
            )
            raise InvalidOptionError("graphs.fp16_relaxed_precision", reason, ())


def check_target(config: CompileConfig) -> None:
    """Raise on the first option that the target cannot have, by any compiler."""
    _check_context(config)
    for core in (core for device in config.devices for core in device.cores or ()):
        if reason := profile_fault(core, config.target.soc.htp_arch):
            raise InvalidOptionError("devices.cores.perf_profile", reason, ())
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


def diagnose(error: ToolchainError) -> ToolchainError:
    """Return the same error, or one that names the operators that HTP does not support."""
    nodes = unsupported_nodes(Path(error.log_path))
    if not nodes:
        return error
    reason = _summary(nodes)
    return ToolchainError(error.step, error.subject, reason, error.exit_status, (), error.log_path)


def unsupported_nodes(log: Path) -> tuple[tuple[str, str], ...]:
    """Return name and operator of every node that the QNN provider refused, once each."""
    try:
        with log.open("rb") as file:
            text = file.read(_MAX_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ()
    lists = _UNSUPPORTED.findall(text)
    return tuple(dict.fromkeys(node for nodes in lists for node in _NODE.findall(nodes)))


def _summary(nodes: Sequence[tuple[str, str]]) -> str:
    """Summarise nodes: `2 operators are not supported: Shrink (2, first act_1)`."""
    first = {operator: name for name, operator in reversed(nodes)}
    counts = Counter(operator for _name, operator in nodes).most_common()
    kinds = [f"{kind} ({count}, first {first[kind]})" for kind, count in counts[:_MAX_KINDS]]
    if len(counts) > _MAX_KINDS:
        kinds.append(f"{len(counts) - _MAX_KINDS} more kinds")
    verb = "operator is" if len(nodes) == 1 else "operators are"
    return f"{len(nodes)} {verb} not supported: {', '.join(kinds)}"
