"""The toolchain of the `onnxruntime-qnn` wheel: real QNN compiler and emulator, no SDK.

ONNX Runtime writes the DLCs; the context binary is made from them through the QNN C API, because
that way all graphs of a split share one binary, in one step, under names of our choice.
"""

import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from buildlib.errors import InvalidBinaryError, ToolchainError, ToolchainTimeoutError
from buildlib.targets import Target
from buildlib.toolchains.base import BinaryInfo, CompileConfig
from buildlib.toolchains.ort_qnn.diagnosis import diagnosed
from buildlib.toolchains.ort_qnn.option_support import check_honoured
from buildlib.toolchains.ort_qnn.requests import (
    CompileRequest,
    ConvertRequest,
    ExecuteRequest,
    GraphRequest,
    InspectRequest,
)
from buildlib.toolchains.ort_qnn.wheel import TOOLCHAIN, find_libraries
from buildlib.toolchains.process import Step, run_step

_WORKER = "buildlib.toolchains.ort_qnn.worker"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long each step may take, in seconds, before it counts as hung."""

    convert_s: float = 1800.0
    compile_s: float = 7200.0
    inspect_s: float = 60.0
    execute_s: float = 600.0
    versions_s: float = 60.0


@dataclass(frozen=True)
class OrtQnnToolchain:
    """`Toolchain` on the `onnxruntime-qnn` wheel.

    Attributes:
        log_dir: keeps the log of every step; by default only logs of failed steps are kept, in the
            temporary folder.
    """

    log_dir: Path | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)

    @property
    def name(self) -> str:
        """Stable name for metadata and cache keys."""
        return TOOLCHAIN

    def versions(self) -> Mapping[str, str]:
        """Versions of the wheels and, as the libraries report them, of QNN and Genie.

        Raises:
            ToolchainMissingError: not Linux x86_64, or the wheel is missing or incomplete.
            ToolchainError: the libraries do not load.
        """
        from importlib.metadata import version

        libraries = find_libraries()
        reported = self._run("versions", libraries.folder, None, self.timeouts.versions_s)
        return {
            "toolchain": TOOLCHAIN,
            "onnxruntime": version("onnxruntime"),
            "onnxruntime_qnn": libraries.version,
            **TypeAdapter(dict[str, str]).validate_python(reported),
        }

    def check(self, config: CompileConfig) -> None:
        """Whether `compile` honours all of it.

        Raises:
            InvalidOptionError: it does not; names the option, and the toolchain that does.
        """
        check_honoured(config)

    def convert(self, onnx: Path, dlc: Path, target: Target) -> None:
        """ONNX in QDQ form to a DLC. Its bytes differ from run to run by a time stamp alone.

        Raises:
            ToolchainMissingError: the wheel is not usable here.
            UnsupportedOperatorsError: some of the model does not run on the tensor processor.
            ToolchainError: it is no model, or the converter died.
        """
        with tempfile.TemporaryDirectory(prefix=f".{dlc.name}.", dir=dlc.parent) as scratch:
            request = ConvertRequest(
                onnx.absolute(),
                Path(scratch).absolute(),
                target.soc.soc_model,
                target.soc.htp_arch,
            )
            try:
                name = self._run("convert", onnx, request, self.timeouts.convert_s)
            except ToolchainError as error:
                raise diagnosed(error) from error
            written = Path(scratch) / str(name)
            written.chmod(0o644)
            _sync(written)
            written.replace(dlc)

    def compile(self, dlcs: Sequence[Path], binary: Path, config: CompileConfig) -> None:
        """DLCs, each of one graph, to one context binary. Equal inputs give equal bytes.

        Raises:
            InvalidOptionError: as `check`.
            ToolchainMissingError: the wheel is not usable here.
            ToolchainError: a DLC is refused, or the compiler died.
        """
        stems = [dlc.stem for dlc in dlcs]
        if not stems or len(set(stems)) != len(stems):
            raise ValueError(f"graphs are named by the stems of their DLCs, which are {stems}")
        self.check(config)
        unfinished = binary.with_name(f".{binary.name}.{uuid.uuid4().hex}.part").absolute()
        request = _compile_request(dlcs, unfinished, config)
        try:
            self._run("compile", binary, request, self.timeouts.compile_s)
            unfinished.replace(binary)
        finally:
            unfinished.unlink(missing_ok=True)

    def inspect(self, binary: Path) -> BinaryInfo:
        """What a context binary says of itself.

        Raises:
            ToolchainMissingError: the wheel is not usable here.
            InvalidBinaryError: it is missing, damaged, or no context binary at all.
        """
        request = InspectRequest(binary.absolute())
        try:
            described = self._run("inspect", binary, request, self.timeouts.inspect_s)
            return TypeAdapter(BinaryInfo).validate_python(described)
        except ToolchainTimeoutError:
            raise
        except ToolchainError as error:
            if self.log_dir is None:
                Path(error.log_path).unlink(missing_ok=True)
            raise InvalidBinaryError(str(binary), error.reason) from error
        except ValidationError as error:
            raise InvalidBinaryError(str(binary), "its description makes no sense") from error

    def execute(
        self,
        binary: Path,
        graph: str,
        inputs: Mapping[str, npt.NDArray[np.generic]],
        *,
        soc_model: int | None = None,
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Run one graph of an unshared context binary once on the HTP emulator.

        Args:
            binary: built for an emulator target.
            graph: its name.
            inputs: arrays as they are stored: the integers of what is quantized.
            soc_model: of the emulated device; by default the library's own choice.

        Raises:
            ToolchainMissingError: the wheel is not usable here.
            ToolchainError: the inputs do not fit, or the emulator refuses the binary or died.
        """
        with tempfile.TemporaryDirectory(prefix="qnnfarm-execute-") as scratch:
            asked, answered = Path(scratch) / "inputs.npz", Path(scratch) / "outputs.npz"
            np.savez(asked, **inputs)  # type: ignore[arg-type]
            request = ExecuteRequest(binary.absolute(), graph, asked, answered, soc_model)
            self._run("execute", binary, request, self.timeouts.execute_s)
            with np.load(answered, allow_pickle=False) as outputs:
                return dict(outputs)

    def _run(self, command: str, subject: Path, request: object, timeout_s: float) -> Any:  # noqa: ANN401 - JSON
        libraries = find_libraries()
        step = Step(_WORKER, command, subject, timeout_s, libraries.search_path)
        body = b"" if request is None else TypeAdapter(type(request)).dump_json(request)
        return run_step(step, body, self.log_dir)


def _compile_request(dlcs: Sequence[Path], binary: Path, config: CompileConfig) -> CompileRequest:
    return CompileRequest(
        graphs=tuple(_graph_request(dlc, config) for dlc in dlcs),
        binary=binary,
        soc_model=config.target.soc.soc_model,
        weight_sharing=config.weight_sharing,
        lora_weight_sharing=config.context.lora_weight_sharing,
        extended_udma=config.context.extended_udma,
    )


def _graph_request(dlc: Path, config: CompileConfig) -> GraphRequest:
    options = config.graph(dlc.stem)
    return GraphRequest(
        dlc=dlc.absolute(),
        vtcm_mb=options.vtcm_size_in_mb or config.target.soc.vtcm_mb,
        optimization_level=options.optimization_type or 3,
        hvx_threads=options.hvx_threads,
        dlbc=options.dlbc,
        dlbc_weights=options.dlbc_weights,
    )


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
