"""A stand-in QAIRT SDK: the documented layout, flags and outputs, over the compiler of PyPI.

Its programs accept what `qairt_tools.toml` has of the public documents, and nothing else.
They record their arguments and environment, and do the real work by the parts that PyPI has: a
converter that knows QDQ, and the compiler. Like those of the SDK, they name a graph by the file
that the converter wrote, whatever that is called afterwards, and compile a graph that the
backend extensions do not name with 4 MiB of VTCM.
"""

import json
import os
import shutil
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buildlib.targets import catalog, parse_target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.htp_extensions import HtpConfigHelper, HtpGraphConfig
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

if TYPE_CHECKING:
    import onnx

TABLE = Path(__file__).parent / "qairt_tools.toml"
HOST = "x86_64-linux-clang"
SCRIPTS = ("qairt-converter", "qairt-quantizer")
NATIVE = ("qnn-context-binary-generator", "qnn-context-binary-utility")
LIBRARIES = ("libQnnHtp.so", "libQnnModelDlc.so", "libQnnHtpNetRunExtensions.so")
_BAKED = "stand-in-graph-name"
_CALLS = "calls.jsonl"
_DEFAULT_VTCM_MB = 4


def make_sdk(root: Path, version: str = "2.39.0.250926") -> Path:
    """Make a stand-in of a release and return its folder."""
    programs, libraries = root / "bin" / HOST, root / "lib" / HOST
    for folder in (programs, libraries, root / "lib" / "python" / "qti"):
        folder.mkdir(parents=True)
    (root / "sdk.yaml").write_text(f"name: qairt\nversion: {version}\n")
    checkout = Path(__file__).parents[3]
    for name in (*SCRIPTS, *NATIVE):
        path = programs / name
        path.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(checkout)!r})\n"
            f"from tests.plugins.qairt.qairt_sdk import main\nmain({name!r})\n"
        )
        path.chmod(0o755)
    for name in LIBRARIES:
        (libraries / name).touch()
    return root


def calls(root: Path) -> list[dict[str, Any]]:
    """Return what the programs of an SDK were called with, in order: `program` and `arguments`."""
    path = root / _CALLS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def main(name: str) -> None:
    root, arguments = sdk_folder(), sys.argv[1:]
    with (root / _CALLS).open("a") as file:
        file.write(json.dumps({"program": name, "arguments": arguments}) + "\n")
    if os.environ.get("QNN_SDK_ROOT") != str(root):
        fail(name, "QNN_SDK_ROOT is not set")
    if name in SCRIPTS and str(root / "lib" / "python") not in os.environ.get("PYTHONPATH", ""):
        fail(name, "ModuleNotFoundError: No module named 'qti'")
    if name in NATIVE and str(root / "lib" / HOST) not in os.environ.get("LD_LIBRARY_PATH", ""):
        fail(name, "error while loading shared libraries: libc++.so.1")
    flags = documented_flags(name, release(root))
    if arguments in (["--help"], ["-h"]):
        sys.stdout.write(f"usage: {name} " + " ".join(f"[{flag}]" for flag in flags) + "\n")
        return
    values = parse(name, flags, arguments)
    {
        "qairt-converter": convert,
        "qairt-quantizer": quantize,
        "qnn-context-binary-generator": generate,
        "qnn-context-binary-utility": describe,
    }[name](values)


def sdk_folder() -> Path:
    """Return the SDK of the program that runs."""
    return Path(sys.argv[0]).resolve().parents[2]


def release(root: Path) -> list[int]:
    return [int(n) for n in (root / "sdk.yaml").read_text().split()[-1].split(".")[:2]]


def documented_flags(name: str, version: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the flags of a program in a release."""
    table = tomllib.loads(TABLE.read_text())
    return {
        flag: row
        for flag, row in table[name]["flags"].items()
        if row.get("since", [0, 0]) <= list(version) <= row.get("until", [99, 0])
    }


def parse(
    name: str, flags: Mapping[str, Mapping[str, Any]], arguments: Sequence[str]
) -> dict[str, list[str]]:
    """Read a command line, or end the process as the program documents."""
    shorts = {row["short"]: flag for flag, row in flags.items() if "short" in row}
    values: dict[str, list[str]] = {}
    current = ""
    for argument in arguments:
        flag = shorts.get(argument, argument)
        if flag in flags:
            current = flag
            values.setdefault(flag, [])
        elif argument.startswith("--") or not current:
            fail(name, f"unrecognized arguments: {argument}", 2)
        else:
            values[current].append(argument)
    for flag, row in flags.items():
        if row.get("required") and flag not in values:
            fail(name, f"the following arguments are required: {flag}", 2)
    for flag, given in values.items():
        check(name, flag, flags[flag], given)
        for other in flags[flag].get("needs", ()):
            if other not in values:
                fail(name, f"{flag} needs {other}")
        for other in flags[flag].get("excludes", ()):
            if other in values:
                fail(name, f"{flag} cannot be used with {other}")
    return values


def check(name: str, flag: str, row: Mapping[str, Any], given: Sequence[str]) -> None:
    """End the process if a flag cannot have these values."""
    number = row["values"]
    least, most = {"?": (0, 1), "*": (0, 999), "+": (1, 999)}.get(number, (number, number))
    if not least <= len(given) <= most:
        fail(name, f"argument {flag}: expected {number} argument(s)", 2)
    for value in given:
        if "only" in row and value not in row["only"]:
            fail(name, f"argument {flag}: invalid choice: {value!r}", 2)
        if "starts" in row and not value.startswith(tuple(row["starts"])):
            fail(name, f"argument {flag}: invalid value: {value!r}", 2)
        if row.get("exists") and not Path(value).exists():
            fail(name, f"argument {flag}: {value} does not exist")


def fail(name: str, message: str, status: int = 1) -> None:
    sys.stderr.write(f"{name}: error: {message}\n")
    raise SystemExit(status)


def convert(values: Mapping[str, list[str]]) -> None:
    name, path = "qairt-converter", Path(values["--input_network"][0])
    output = Path(values.get("--output_path", [str(path.with_suffix(".dlc"))])[0])
    target = parse_target(values.get("--target_soc_model", ["SM8650"])[0])
    import onnx  # which the other programs do without

    model = onnx.load(str(path), load_external_data=False)
    opset = max(entry.version for entry in model.opset_import)
    rows = tomllib.loads(TABLE.read_text())["opsets"]
    limit = max(row["opset"] for row in rows if row["since"] <= release(sdk_folder()))
    if opset > limit:
        fail(name, f"ERROR_ONNX_OPSET: {opset} is not supported, the last is {limit}")
    infer_norms(model)
    with tempfile.NamedTemporaryFile(suffix=".onnx", dir=path.parent) as inferred:
        inferred.write(model.SerializeToString())
        inferred.flush()
        OrtQnnToolchain().convert(Path(inferred.name), output, target)
    with zipfile.ZipFile(output, "a") as archive:
        archive.writestr(_BAKED, output.name.removesuffix(".dlc").replace(".", "_"))
    sys.stdout.write("INFO_CONVERSION_SUCCESS: Conversion completed successfully\n")


def infer_norms(model: "onnx.ModelProto") -> None:
    """Put RMSNormalization for what it is written out as, as converters infer QNN's operation."""
    from onnx import helper, numpy_helper

    makers = {out: node for node in model.graph.node for out in node.output}
    values = {one.name: one for one in model.graph.initializer}

    def chain(node: "onnx.NodeProto", *kinds: str) -> "list[onnx.NodeProto]":
        found = [node]
        for kind in kinds:
            maker = next(
                (m for name in found[-1].input if (m := makers.get(name)) and m.op_type == kind),
                None,
            )
            if maker is None:
                return []
            found.append(maker)
        return found

    inner = set()
    for node in model.graph.node:
        parts = chain(node, "Div", "Sqrt", "Add", "ReduceMean", "Pow")
        if node.op_type == "Mul" and parts:
            source, epsilon = parts[5].input[0], values[parts[3].input[1]]
            node.CopyFrom(
                helper.make_node(
                    "RMSNormalization", [source, node.input[1]], list(node.output), node.name,
                    axis=-1, epsilon=float(numpy_helper.to_array(epsilon)),
                )
            )  # fmt: skip
            inner |= {part.output[0] for part in parts[1:]}
    kept = [node for node in model.graph.node if node.output[0] not in inner]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    model.opset_import[0].version = 23


def quantize(values: Mapping[str, list[str]]) -> None:
    source = Path(values["--input_dlc"][0])
    default = source.with_name(f"{source.stem}_quantized.dlc")
    shutil.copyfile(source, values.get("--output_dlc", [str(default)])[0])
    sys.stdout.write("Quantization completed successfully\n")


def generate(values: Mapping[str, list[str]]) -> None:
    name = "qnn-context-binary-generator"
    extensions = read_extensions(name, values["--config_file"][0])
    device = extensions["devices"][0]
    soc = next((soc for soc in catalog() if soc.soc_model == device["soc_model"]), None)
    if soc is None or soc.dsp_arch != device["dsp_arch"]:
        fail(name, f"no such device: {device}")
    assert soc is not None
    contexts, named, *_ = HtpConfigHelper.from_backend_extension_dict(extensions)
    options = {graph.name: graph for graph in named}
    output = Path(values["--output_dir"][0])
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        dlcs = []
        for path in values["--dlc_path"][0].split(","):
            with zipfile.ZipFile(path) as archive:
                graph = archive.read(_BAKED).decode()
            dlcs.append(Path(scratch) / f"{graph}.dlc")
            shutil.copyfile(path, dlcs[-1])
        unnamed = HtpGraphConfig(vtcm_size_in_mb=_DEFAULT_VTCM_MB, optimization_type=2)
        config = CompileConfig(
            soc_details=parse_target(soc.name),
            context=contexts[0],
            graphs=tuple(
                options.get(dlc.stem, unnamed).model_copy(update={"name": dlc.stem}) for dlc in dlcs
            ),
        )
        binary = output / f"{values['--binary_file'][0]}.bin"
        OrtQnnToolchain().compile(dlcs, binary, config)


def read_extensions(name: str, path: str) -> dict[str, Any]:
    outer = json.loads(Path(path).read_text())
    for key in outer.keys() - {"backend_extensions", "context_configs", "graph_configs"}:
        fail(name, f"Unknown Key = {key} passed in config")
    named = outer["backend_extensions"]
    if not Path(named["shared_library_path"]).is_file():
        fail(name, f"cannot load {named['shared_library_path']}")
    inner: dict[str, Any] = json.loads(Path(named["config_file_path"]).read_text())
    for key in inner.keys() - {"devices", "memory", "context", "graphs", "groupContext"}:
        fail(name, f"Unknown Key = {key} passed in config")
    return inner


def describe(values: Mapping[str, list[str]]) -> None:
    info = OrtQnnToolchain().inspect(Path(values["--context_binary"][0]))

    def tensors(some: Sequence[Any]) -> list[dict[str, Any]]:
        return [{"info": {"name": t.name, "dimensions": list(t.shape)}} for t in some]

    graphs = [
        {
            "info": {
                "graphName": graph.name,
                "graphInputs": tensors(graph.inputs),
                "graphOutputs": tensors(graph.outputs),
            }
        }
        for graph in info.graphs
    ]
    described = {"info": {"graphs": graphs, "buildId": info.build_id}}
    Path(values["--json_file"][0]).write_text(json.dumps(described))
