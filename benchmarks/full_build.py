"""The whole build of a model of Llama's shape, timed as users run it: as `qnnfarm build`.

Random weights, AR 1 and 128 at CL 4096, weight-shared for a phone. From a bfloat16
checkpoint, from a float ONNX without encodings in the layout of other generators (`MatMul`), or
from a float ONNX with encodings. Then the same command with nothing changed, and with one option of
the compiler changed. Time and peak memory of all processes, stage by stage.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from benchmarks.memory_meter import MemoryMeter
from benchmarks.random_encodings import write_random_encodings
from benchmarks.random_llama import LLAMA_1B, LLAMA_3B, Sizes, make_random_llama
from buildlib.graph.files import load_model, save_model
from buildlib.graph.shape import GraphShape
from suites.models import tiny_llama

Origin = Literal["checkpoint", "onnx", "encodings"]

AR, CL = 128, 4096
CHANGED_OPTION = "graphs.optimization_type=1"
GIB = 1 << 30
_STAGE = re.compile(r"[^:]+: (?:\d+/\d+ )?(?P<what>.+) \((?P<how>cached|[\d.]+ s)\)")
_AUTHORING = """
import re, sys, time
from pathlib import Path
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
began = time.monotonic()
export_onnx(Checkpoint.load(Path(sys.argv[1])), GraphShape(128, 4096), Path(sys.argv[2]))
seconds = time.monotonic() - began
status = Path("/proc/self/status").read_text()  # ru_maxrss has the parent's memory in it
print(seconds, int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024)
"""


@dataclass(frozen=True)
class Goal:
    """Sizes of a model, and what its build may take; None is not judged."""

    sizes: Sizes
    whole_s: float | None
    peak_bytes: int
    again_s: float


GOALS = {
    "1B": Goal(LLAMA_1B, 360, 12 << 30, 1.0),
    "3B": Goal(LLAMA_3B, None, 16 << 30, 2.0),
}


@dataclass(frozen=True)
class Stage:
    """One stage that ran; memory is the peak of all processes since the stage before it."""

    name: str
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Outcome:
    """One command; `cpu_s` is of all its processes, and tells more than a busy host's clock."""

    seconds: float
    cpu_s: float
    peak_bytes: int
    stages: tuple[Stage, ...]
    summary: dict[str, object]


def make_model(
    folder: Path, sizes: Sizes, origin: Origin, bits: int, text_bytes: int | None
) -> Path:
    """Make a model folder as the builder takes it; as a checkpoint tied and in bfloat16."""
    began = time.monotonic()
    shape = GraphShape(AR, CL)
    checkpoint = origin == "checkpoint"
    dtype: Literal["F32", "BF16"] = "BF16" if checkpoint else "F32"
    tied = origin != "encodings"
    model = make_random_llama(folder, shape=shape, tied=tied, dtype=dtype, **sizes)
    if checkpoint:
        model.unlink()
    elif origin == "onnx":
        write_as_others(model)
    else:
        write_random_encodings(model, bits)
    source = tiny_llama.folder()
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    (folder / "text").mkdir()
    text = (source / "text" / "calibration.txt").read_bytes()
    (folder / "text" / "calibration.txt").write_bytes(text[:text_bytes])
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"model made in {time.monotonic() - began:.1f} s: {size / GIB:.2f} GiB", flush=True)
    return folder


def write_as_others(model_path: Path) -> None:
    """Replace each projection by a `MatMul` with a weight [in, out], as torch's exporters write it.

    The bytes stay: numbers that are random in one order are random in the other.
    """
    model = load_model(model_path)
    folded: set[str] = set()
    for node in list(model.graph):
        if node.op_type != "Gemm":
            continue
        activation, weight = node.inputs[:2]
        assert activation is not None  # noqa: S101  (of our own graph)
        assert weight is not None  # noqa: S101
        name = str(weight.name)
        if name == "lm_head.weight" or name in folded or len(node.inputs) > 2:
            continue
        tensor = weight.const_value
        assert isinstance(tensor, ir.ExternalTensor)  # noqa: S101
        dims = ir.Shape(list(tensor.shape.numpy())[::-1])
        weight.shape = dims
        weight.const_value = ir.ExternalTensor(
            tensor.location, tensor.offset, tensor.length, tensor.dtype,
            shape=dims, name=name, base_dir=tensor.base_dir,
        )  # fmt: skip
        output = node.outputs[0]
        matmul = ir.node("MatMul", [activation, weight], name=node.name)
        matmul.outputs[0].name = output.name
        matmul.outputs[0].shape, matmul.outputs[0].type = output.shape, output.type
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [matmul], [output], matmul.outputs
        )
        folded.add(name)
    save_model(model, model_path)


def measure_authoring(checkpoint: Path, scratch: Path) -> tuple[float, int]:
    """Measure seconds and peak bytes of writing the float ONNX, in a process of its own."""
    command = [sys.executable, "-c", _AUTHORING, str(checkpoint), str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(scratch)
    seconds, peak = done.stdout.split()
    return float(seconds), int(peak)


def build(command: Sequence[str], cache: Path) -> Outcome:
    """Run `qnnfarm build` as a process, and print each stage as it ends."""
    stages: list[Stage] = []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    with MemoryMeter() as meter:
        running = subprocess.Popen(
            [sys.executable, "-m", "harness.cli", "build", *command, "--json"],
            env=os.environ | {"QNNFARM_CACHE_DIR": str(cache), "COLUMNS": "200"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert running.stderr is not None  # noqa: S101  (it was asked for)
        assert running.stdout is not None  # noqa: S101
        said = []
        for line in running.stderr:
            said.append(line)
            found = _STAGE.match(line)
            if found and found["how"] != "cached":
                stage = Stage(found["what"], float(found["how"].split()[0]), meter.lap())
                stages.append(stage)
                peak = f"{stage.peak_bytes / GIB:7.2f} GiB"
                print(f"  {stage.name:<38}{stage.seconds:7.1f} s{peak}", flush=True)
        answer = running.stdout.read()
        if running.wait() != 0:
            raise SystemExit("".join(said[-3:]))
    seconds = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Outcome(seconds, cpu_s, meter.peak_bytes, tuple(stages), json.loads(answer)[0])


def disk_bytes(folder: Path) -> int:
    """Return bytes below a folder, a file with several names counted once."""
    files = (path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum({stat.st_ino: stat.st_size for stat in files}.values())


def judge(checks: Iterable[tuple[str, bool]]) -> bool:
    """Print what holds and what does not."""
    results = list(checks)
    for text, holds in results:
        print(f"{'ok  ' if holds else 'MISS'} {text}")
    return all(holds for _text, holds in results)


def run(root: Path, args: argparse.Namespace) -> bool:
    """Build three times; whether all limits hold."""
    goal: Goal = GOALS[args.shape]
    sizes = goal.sizes.copy()
    sizes["layers"] = args.layers or sizes["layers"]
    model = make_model(root / "model", sizes, args.origin, args.bits, args.text_bytes)
    checks = []
    if args.origin == "checkpoint":
        seconds, peak = measure_authoring(model, root / "authored")
        print(f"  {'authoring alone':<38}{seconds:7.1f} s{peak / GIB:7.2f} GiB")
        checks += [
            (
                f"authoring {seconds:.1f} s <= 3 s, {peak >> 20} MiB <= 286 MiB",
                seconds <= 3 and peak <= 300_000_000,
            )
        ]
    cache, out = root / "cache", root / "out"
    command = [
        str(model), "--target", args.target, "--out", str(out), "--ar", f"1,{AR}", "--cl", str(CL),
        "-O", f"quantization.param_bitwidth={args.bits}",
    ]  # fmt: skip
    if args.splits:
        command += ["--splits", str(args.splits)]
    parts = f"{args.splits or 'default'} parts"
    print(f"{args.shape} from {args.origin}, W{args.bits}A16, {parts}, {args.target}")
    first = build(command, cache)
    text = f"{first.seconds:7.1f} s{first.peak_bytes / GIB:7.2f} GiB {first.cpu_s:.0f} s of CPU"
    print(f"  {'whole build':<38}{text}")
    own = disk_bytes(root) - disk_bytes(model)
    print(f"  {'cache and container':<38}{own / GIB:17.2f} GiB", flush=True)
    again = build(command, cache)
    text = f"{again.seconds:8.2f} s{again.cpu_s:21.2f} s of CPU"
    print(f"  {'nothing changed':<38}{text}", flush=True)
    checks += [
        (
            f"peak {first.peak_bytes / GIB:.2f} GiB <= {goal.peak_bytes / GIB:.0f} GiB",
            first.peak_bytes <= goal.peak_bytes,
        ),
        (f"again {again.seconds:.2f} s <= {goal.again_s} s", again.seconds <= goal.again_s),
        ("again runs nothing", again.summary["stages_run"] == 0),
    ]
    if goal.whole_s is not None:
        text = f"first build {first.seconds:.0f} s <= {goal.whole_s:.0f} s"
        checks.append((text, first.seconds <= goal.whole_s))
    if not args.first_only:
        print(f"changed {CHANGED_OPTION}")
        changed = build([*command, "-O", CHANGED_OPTION, "--overwrite"], cache)
        print(f"  {'whole build':<38}{changed.seconds:7.1f} s")
        ran = {stage.name.split()[0] for stage in changed.stages}
        checks.append((f"changed option runs {sorted(ran)}", ran == {"compile", "package"}))
    return judge(checks)


def main() -> int:
    """Run the benchmark; return 0 if all limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=tuple(GOALS), default="1B")
    parser.add_argument(
        "--from", dest="origin", choices=("checkpoint", "onnx", "encodings"), default="encodings"
    )
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--bits", type=int, choices=(8, 4), default=8, help="of weights")
    parser.add_argument(
        "--text-bytes", type=int, help="calibrate on so much text alone: the same memory, less time"
    )
    parser.add_argument("--splits", type=int, help="parts; by default as many as a build chooses")
    parser.add_argument("--target", default="SM8750")
    parser.add_argument("--first-only", action="store_true", help="change no option")
    parser.add_argument("--folder", type=Path, help="work here, not in a temporary folder")
    parser.add_argument("--keep", action="store_true", help="leave model and cache there")
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="qnnfarm-full-build-", dir=args.folder))
    try:
        return 0 if run(root, args) else 1
    finally:
        if args.keep:
            print(f"kept in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
