"""`Toolchain` of the QAIRT SDK: converter, quantizer and context binary generator.

Sources of the command lines, all public: "Tools" and "Qairt Converter" (docs.qualcomm.com
80-63442-2, revision BL) for `qairt-converter`; AIMET's "On-target inference" (BSD-3-Clause,
github.com/quic/aimet) for the three steps, quantizer and `qnn-context-binary-generator`;
ai-hub-apps, `tutorials/llm_on_genie`, for the backend extensions; ExecuTorch's
`examples/qualcomm/README.md` for `qnn-context-binary-utility`. No machine of the project has the
SDK: `qnnfarm conformance` proves this module, on one that has.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from buildlib.errors import (
    InputFileError,
    InvalidOptionError,
    ToolchainError,
    ToolchainMissingError,
)
from buildlib.files import atomic_path, sync_file
from buildlib.targets import Target
from buildlib.toolchains.base import BinaryInfo, GraphPorts, OpPackageLibrary, host_fault
from buildlib.toolchains.child_process import Program, run_program
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.htp_extensions import HtpConfigHelper, HtpDeviceConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain, check_target
from buildlib.toolchains.qnn.refusal import RefusedError
from plugins.qairt.sdk import (
    CONVERTER,
    GENERATOR,
    PYTHON_VARIABLE,
    QUANTIZER,
    TOOLCHAIN,
    UTILITY,
    QairtSdk,
)

if TYPE_CHECKING:
    import onnx

_OPSET = 21
_NORM = "RMSNormalization"
_GRAPH_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONVERTS_QDQ = (2, 35)
"""From the first release on whose documents convert QDQ in a single step; older ones quantize."""
_HELP_TIMEOUT_S = 120.0
_TIMEOUTS_S = {CONVERTER: 7200.0, QUANTIZER: 7200.0, GENERATOR: 14400.0, UTILITY: 600.0}
"""Seconds that each program may take before it counts as hung."""
_NO_OP_PACKAGES = (
    "the SDK's converter wants its own description of them (--op_package_config), which is not "
    "written here; build with `--toolchain pypi`"
)
_NO_PORTS = (
    "the SDK's converter chooses the order of a graph's inputs and outputs, and this contract has "
    "its own; build with `--toolchain pypi`"
)


def open_toolchain(sdk: Path | None, log_dir: Path | None) -> "QairtToolchain":
    """See `ToolchainModule`."""
    return QairtToolchain(QairtSdk.find(sdk), log_dir)


def examine_host() -> tuple[Literal["ok", "note"], str, str] | None:
    """See `ToolchainModule`; nothing needs the SDK that does not ask for it."""
    if host_fault():
        return None
    try:
        sdk = QairtSdk.find()
    except ToolchainMissingError as error:
        detail, _, advice = error.reason.partition("; ")
        return "note", detail, f"for `--toolchain qairt`, {advice}"
    where = f"{sdk.version} in {sdk.root}"
    for name in (CONVERTER, QUANTIZER):
        try:
            QairtToolchain(sdk).help(name)
        except ToolchainError as error:
            last = error.log_tail[-1] if error.log_tail else error.reason
            advice = f"{PYTHON_VARIABLE} names a Python with what it imports (qairt.md)"
            return "note", f"{where}: {name} does not start: {last}", advice
    return "ok", f"{where}: its converter and quantizer start", ""


@dataclass(frozen=True)
class QairtToolchain:
    """`Toolchain` on an unpacked SDK.

    Context binaries are described by PyPI's reader, which is also the emulator's.

    Attributes:
        log_dir: keeps the log of every program. By default those of a step lie beside its output,
            and those of failed ones in the temporary folder.
    """

    sdk: QairtSdk
    log_dir: Path | None = None

    @property
    def name(self) -> str:
        """Stable name for metadata and cache keys."""
        return TOOLCHAIN

    def versions(self) -> Mapping[str, str]:
        """Return the release of the SDK."""
        return {"toolchain": TOOLCHAIN, "qairt_sdk": self.sdk.version}

    def check(self, config: CompileConfig) -> None:
        """Refuse options that the target cannot have; those unknown here go to the compiler."""
        check_target(config)

    def convert(self, onnx: Path, dlc: Path, target: Target) -> None:
        """Convert QDQ ONNX to a DLC; tensors without encodings are computed as floats.

        Raises:
            InputFileError: the DLC's name cannot be that of a graph: the converter writes it into
                the file.
            ToolchainError: the model is refused, or a program died.
        """
        if not _GRAPH_NAME.fullmatch(dlc.stem):
            reason = "its stem becomes the name of its graph, and may have letters, digits and _"
            raise InputFileError(str(dlc), reason)
        with lowered_opset(onnx.absolute()) as lowered, _scratch(dlc) as scratch:
            new_dlc, backend = scratch / dlc.name, ("HTP", "--target_soc_model", target.soc.name)
            arguments = ["--input_network", str(lowered), "--output_path", str(new_dlc)]
            arguments += ["--preserve_io_datatype", "--target_backend", *backend]
            self._run(CONVERTER, dlc, new_dlc, arguments)
            if self.sdk.release < _CONVERTS_QDQ:
                converted = new_dlc.rename(scratch / f"converted-{dlc.name}")
                arguments = ["--input_dlc", str(converted), "--output_dlc", str(new_dlc)]
                self._run(QUANTIZER, dlc, new_dlc, [*arguments, "--float_fallback"])
            sync_file(new_dlc)
            new_dlc.replace(dlc)

    def op_package(self, package: OpPackageLibrary) -> tuple[str, ...]:
        """Refuse: graphs with operations of op packages are not converted."""
        raise InvalidOptionError(str(package.library), _NO_OP_PACKAGES, ())

    def compile(
        self,
        dlcs: Sequence[Path],
        binary: Path,
        config: CompileConfig,
        op_packages: Sequence[OpPackageLibrary] = (),
        ports: Mapping[str, GraphPorts] | None = None,
    ) -> BinaryInfo:
        """Compile DLCs of one graph each to one context binary.

        The binary must say that its graphs have the names and the VTCM that were asked for:
        the generator compiles a graph that its configuration does not name with defaults.
        """
        stems = [dlc.stem for dlc in dlcs]
        if not stems or len(set(stems)) != len(stems):
            raise ValueError(f"graphs are named by the stems of their DLCs, which are {stems}")
        self.check(config)
        for package in op_packages:
            self.op_package(package)
        if ports:
            raise InvalidOptionError("toolchain", _NO_PORTS, ())
        with _scratch(binary) as scratch, atomic_path(binary.absolute()) as unfinished:
            outputs = scratch / "output"
            outputs.mkdir()
            for dlc in dlcs:  # paths may have commas, which separate DLCs; names here have none
                (outputs / dlc.name).symlink_to(dlc.absolute())
            arguments = ["--backend", str(self.sdk.library("libQnnHtp.so"))]
            arguments += ["--model", str(self.sdk.library("libQnnModelDlc.so"))]
            arguments += ["--dlc_path", ",".join(dlc.name for dlc in dlcs)]
            arguments += ["--output_dir", str(outputs), "--binary_file", "context"]
            arguments += ["--config_file", str(self._write_config(config, stems, scratch))]
            result = outputs / "context.bin"
            log = self._run(GENERATOR, binary, result, arguments)
            try:
                info = self._checked(result, config, stems)
            except RefusedError as error:
                raise ToolchainError(GENERATOR, str(binary), str(error), 0, (), str(log)) from error
            result.replace(unfinished)
        return info

    def inspect(self, binary: Path) -> BinaryInfo:
        """Describe a context binary, by PyPI's reader."""
        return OrtQnnToolchain(self.log_dir).inspect(binary)

    def description(self, binary: Path) -> Mapping[str, Any]:
        """Return the description of a context binary by the SDK's `qnn-context-binary-utility`."""
        with tempfile.TemporaryDirectory(prefix="qnnfarm-describe-") as folder:
            json_file = Path(folder) / "binary.json"
            arguments = ["--context_binary", str(binary.absolute()), "--json_file", str(json_file)]
            self._run(UTILITY, binary, json_file, arguments)
            try:
                described = json.loads(json_file.read_bytes())
            except (OSError, ValueError) as error:
                raise InputFileError(str(binary), f"{UTILITY} wrote no JSON of it") from error
        if not isinstance(described, dict):
            raise InputFileError(str(binary), f"{UTILITY} wrote no JSON object of it")
        return described

    def _write_config(self, config: CompileConfig, names: Sequence[str], folder: Path) -> Path:
        """Write the backend extensions, and the file that names them; return the path of that."""
        soc = config.target.soc
        device = config.devices[0] if config.devices else HtpDeviceConfig()
        numbers = {"soc_model": soc.soc_model, "dsp_arch": soc.dsp_arch}
        extensions = HtpConfigHelper.to_backend_extension_dict(
            (),
            [config.graph(name) for name in names],
            [device.model_copy(update=numbers)],
            config.memory,
            config.group_context,
            config.section_extras,
        )
        extensions["context"] = config.context.as_extension()  # an object, as in the tutorial
        inner, outer = folder / "extensions.json", folder / "config.json"
        inner.write_text(json.dumps(extensions, indent=2), encoding="utf-8")
        library = str(self.sdk.library("libQnnHtpNetRunExtensions.so"))
        values = {"shared_library_path": library, "config_file_path": str(inner)}
        outer.write_text(json.dumps({"backend_extensions": values}, indent=2), encoding="utf-8")
        return outer

    def _checked(self, path: Path, config: CompileConfig, names: Sequence[str]) -> BinaryInfo:
        """Describe a context binary, which is refused if it is not as `config` says."""
        try:
            info = self.inspect(path)
        except InputFileError as error:
            reason = f"what release {self.sdk.version} wrote is not read here: {error.reason}"
            raise RefusedError(reason) from error
        found, wanted = (", ".join(sorted(some)) for some in ((g.name for g in info.graphs), names))
        if found != wanted:
            raise RefusedError(f"its graphs are {found}, and not {wanted}")
        if (soc_model := config.target.soc.soc_model) != info.soc_model:
            raise RefusedError(f"it is for soc_model {info.soc_model}, and not {soc_model}")
        for graph in info.graphs:
            vtcm_mb = config.graph(graph.name).vtcm_size_in_mb
            if graph.vtcm_mb != vtcm_mb:
                raise RefusedError(f"{graph.name} has {graph.vtcm_mb} MiB of VTCM, not {vtcm_mb}")
        return info

    def help(self, name: str) -> str:
        """Return the `--help` of a program, which proves that it starts here."""
        with tempfile.TemporaryDirectory(prefix="qnnfarm-help-") as folder:
            path = Path(folder)
            call = self._program(name, self.sdk.program(name), path, ("--help",), _HELP_TIMEOUT_S)
            return run_program(call, path).read_text(encoding="utf-8", errors="replace")

    def _run(self, name: str, subject: Path, made: Path, arguments: Sequence[str]) -> Path:
        """Run a program, which must make a file, and return its log."""
        program = self._program(name, subject, made.parent, arguments, _TIMEOUTS_S[name])
        log = run_program(program, self.log_dir)
        if not made.is_file():
            reason = f"it ended well and did not write {made.name}"
            raise ToolchainError(name, str(subject), reason, 0, (), str(log))
        if self.log_dir is None and name == UTILITY:
            log.unlink()
        elif self.log_dir is None:
            log = Path(shutil.move(log, subject.absolute().with_name(f"{subject.stem}.{name}.log")))
        return log

    def _program(
        self, name: str, subject: Path, folder: Path, arguments: Sequence[str], timeout_s: float
    ) -> Program:
        environment = self.sdk.environment() | {"QAIRT_TMP_DIR": str(folder)}
        command = [*self.sdk.command(name), *arguments]
        return Program(command, name, subject, timeout_s, environment, folder)


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """Make a folder beside an output, so that its files can be renamed into place."""
    with tempfile.TemporaryDirectory(
        prefix=f".{output.name}.", dir=output.absolute().parent
    ) as name:
        yield Path(name).absolute()


@contextmanager
def lowered_opset(path: Path) -> Iterator[Path]:
    """Yield a model in opset 21, a file beside it for the block, as its weights lie there.

    "Qairt Converter" (docs.qualcomm.com 80-63442-2, revision BL) has opset 21 as the last, later
    documents 22 and 24. The graphs here are of 23, for RMSNormalization alone: written out, it has
    the form of exports of older opsets, from which converters are documented to infer QNN's
    operation.
    """
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    constants: dict[str, onnx.TensorProto] = {}

    def constant(name: str, value: float | list[int]) -> str:
        kind = np.int64 if isinstance(value, list) else np.float32
        constants[name] = numpy_helper.from_array(np.asarray(value, kind), name)
        return name

    nodes = []
    for node in graph.node:
        if node.op_type != _NORM:
            _check_operator(path, node)
            nodes.append(node)
            continue
        attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        if attributes.pop("axis", -1) != -1 or attributes.pop("stash_type", 1) != 1:
            raise InputFileError(str(path), f"{node.name}: {_NORM} of more than the last axis")
        epsilon = float(attributes.pop("epsilon", 1e-5))
        (source, weight), (out,) = node.input, node.output
        two, axes = constant("opset_two", 2.0), constant("opset_axes", [-1])
        small = constant(f"opset_epsilon_{epsilon:g}", epsilon)
        nodes += [
            helper.make_node("Pow", [source, two], [f"{out}_square"], f"{node.name}_square"),
            helper.make_node("ReduceMean", [f"{out}_square", axes], [f"{out}_mean"], keepdims=1),
            helper.make_node("Add", [f"{out}_mean", small], [f"{out}_added"]),
            helper.make_node("Sqrt", [f"{out}_added"], [f"{out}_root"]),
            helper.make_node("Div", [source, f"{out}_root"], [f"{out}_scaled"]),
            helper.make_node("Mul", [f"{out}_scaled", weight], [out], node.name),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(constants.values())
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = min(entry.version, _OPSET)
    with tempfile.NamedTemporaryFile(suffix=path.name, prefix=".", dir=path.parent) as file:
        file.write(model.SerializeToString())
        file.flush()
        yield Path(file.name)


def _check_operator(path: Path, node: "onnx.NodeProto") -> None:
    from onnx import defs

    if node.domain not in ("", "ai.onnx"):
        reason = f"{node.domain}::{node.op_type} is no operator of ONNX: build with pypi"
        raise InputFileError(str(path), reason)
    try:
        attributes = defs.get_schema(node.op_type, _OPSET).attributes
    except defs.SchemaError as error:
        reason = f"opset {_OPSET}, which the SDK reads, has no {node.op_type}"
        raise InputFileError(str(path), reason) from error
    if more := [one.name for one in node.attribute if one.name not in attributes]:
        reason = f"{node.op_type} has no {', '.join(more)} in opset {_OPSET}, which the SDK reads"
        raise InputFileError(str(path), reason)
