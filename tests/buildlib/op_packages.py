"""Libraries that gcc makes for tests: op packages, and stand-ins for other machines."""

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import onnx

from buildlib.checkpoint.layout import ENCODINGS_FILE, MODEL_FILE
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from tests.system import needs, program

SCALE = Path(__file__).parents[2] / "suites/op_packages/scale/scale.c"
PROVIDER = "ScaleProvider"
PACKAGE = "qnnfarm.scale"
_MACHINES = {"hexagon": (32, 164), "aarch64": (64, 183)}


def build_library(
    library: Path,
    source: str | Path,
    *,
    bits: int = 64,
    machine: str | None = None,
    flags: int = 0,
    options: Sequence[str] = (),
) -> Path:
    """Compile a library from C.

    Args:
        machine: whose number stands in its header in place of the host's; its code stays that of
            the host.
        flags: `e_flags` of such a library.
    """
    if machine is not None:
        bits, number = _MACHINES[machine]
    needs("libc6-dev")
    command = [str(program("gcc")), "-shared", "-fPIC", "-O2", f"-m{bits}", "-o", str(library)]
    command += [] if bits == 64 else ["-nostdlib"]
    command += ["-x", "c", "-", "-x", "none", *options]
    text = source if isinstance(source, str) else source.read_text()
    subprocess.run(command, input=text, text=True, check=True)
    if machine is not None:
        data = bytearray(library.read_bytes())
        struct.pack_into("<H", data, 18, number)
        struct.pack_into("<I", data, 36 if bits == 32 else 48, flags)
        library.write_bytes(data)
    return library


def build_package(library: Path, source: str | Path = SCALE) -> Path:
    """Compile an op package for this host, as the first lines of the example say."""
    link = ["-L", str(find_libraries().folder), "-l:libQnnHtp.so", "-Wl,--allow-shlib-undefined"]
    return build_library(library, source, options=link)


def scale_logits(export: Path) -> None:
    """Put the example's operation between a model and its logits, with a function for its floats.

    The encoding of the logits goes, since it is that of the values before.
    """
    needs("plugins.onnx_exports")
    encodings = load_encodings(export / ENCODINGS_FILE)
    kept = [one for one in encodings.activation_encodings if one.name != "logits"]
    given = encodings.model_copy(update={"activation_encodings": tuple(kept)})
    save_encodings(given, export / ENCODINGS_FILE)
    model = onnx.load(str(export / MODEL_FILE), load_external_data=False)
    graph = model.graph
    (last,) = [node for node in graph.node if "logits" in node.output]
    last.output[0] = "scores"
    graph.node.append(onnx.helper.make_node("Scale", ["scores"], ["logits"], domain=PACKAGE))
    constants = [
        onnx.helper.make_node("Constant", [], [name], value_float=value)
        for name, value in (("factor", 3.0), ("offset", 1.0))
    ]
    body = [
        onnx.helper.make_node("Mul", ["x", "factor"], ["product"]),
        onnx.helper.make_node("Add", ["product", "offset"], ["y"]),
    ]
    opsets = [onnx.helper.make_opsetid("", 23)]
    function = onnx.helper.make_function(PACKAGE, "Scale", ["x"], ["y"], constants + body, opsets)
    model.functions.append(function)
    model.opset_import.append(onnx.helper.make_opsetid(PACKAGE, 1))
    onnx.save(model, str(export / MODEL_FILE))
