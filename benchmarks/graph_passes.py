"""Cost of the graph passes at full size, beside onnx's own functions.

    .venv/bin/python -m benchmarks.graph_passes [--with-onnx] [--folder FOLDER]

Everything is measured in this run, on this machine, each row in a child process of its own. The
first model has Llama-3.2-1B's shape and 6 GB of random float32 weights; for those of other sizes
the weights are a hole in a file, which no pass notices. `--with-onnx` adds the functions that load
all weights: they take minutes, 19 GB of memory and 18 GB of disk.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Nothing of ours is imported here: the children that run onnx's functions do not pay for it.

ARS, CL = (128, 1), 4096
N_PARTS = 3

Step = Callable[[Path, Path], None]


def our_passes(model: Path, out: Path) -> None:
    """Transform both (AR, CL), each in three parts, every head's attention on its own."""
    from buildlib.graph.shape import GraphShape
    from buildlib.passes.arcl import convert_arcl
    from buildlib.passes.mha2sha import convert_mha2sha
    from buildlib.passes.split import split_model

    for shape in (GraphShape(ar, CL) for ar in ARS):
        converted = convert_arcl(model, shape, out / f"{shape}" / "model.onnx")
        for part in split_model(converted, N_PARTS, out / f"{shape}_parts"):
            convert_mha2sha(part, out / f"{shape}_heads" / part.name)


def graph_only(model: Path, out: Path) -> None:
    """Read and write the graph without weights by onnx: the least that one pass costs."""
    import onnx

    loaded = onnx.load(model, load_external_data=False)
    onnx.save(loaded, out / model.name)


class CannotError(Exception):
    """A function of onnx cannot do this at all; says why in words."""


def plain_copy(model: Path, out: Path) -> None:
    """Copy all bytes once."""
    for file in model.parent.iterdir():
        shutil.copyfile(file, out / file.name)


def load_and_save(model: Path, out: Path) -> None:
    """Read all weights into memory and write them once."""
    import onnx

    loaded = onnx.load(model)
    onnx.save(loaded, out / model.name, save_as_external_data=True, location="weights")


def extract_three(model: Path, out: Path) -> None:
    """Extract three parts by onnx's own function, which is told their boundaries."""
    import onnx
    import onnx.utils
    from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

    graph = onnx.load(model, load_external_data=False).graph
    layers = sum(value.name.startswith("past_key") for value in graph.input)
    cuts = [f"layer_{layers * part // N_PARTS - 1}_output" for part in range(1, N_PARTS)]
    for number, (start, stop) in enumerate(
        zip(["input_ids", *cuts], [*cuts, "logits"], strict=True)
    ):
        first, last = layers * number // N_PARTS, layers * (number + 1) // N_PARTS
        kv = [f"past_{kind}_{layer}" for layer in range(first, last) for kind in ("key", "value")]
        inputs = [start, "attention_mask", "position_ids_cos", "position_ids_sin"]
        try:
            onnx.utils.extract_model(
                str(model),
                str(out / f"part_{number}.onnx"),
                [*inputs, *(f"{name}_in" for name in kv)],
                [stop, *(f"{name}_out" for name in kv)],
                check_model=False,
            )
        except EncodeError:
            # Before it decides how to write a part, it has protobuf put all of it into one buffer.
            reason = f"part {number + 1} with its weights is above protobuf's limit of 2 GB"
            raise CannotError(reason) from None


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (our_passes, graph_only, plain_copy, load_and_save, extract_three)
}


def child(step: str, model: Path, out: Path) -> None:
    """Run one step in this process, and print what it took."""
    began = time.perf_counter()
    try:
        STEPS[step](model, out)
    except CannotError as error:
        print(json.dumps({"cannot": str(error), "wall_s": time.perf_counter() - began}))
        return
    took = {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time(),
        "rss_mb": peak_mb(),
    }
    print(json.dumps(took))


def peak_mb() -> float:
    """Return the peak resident memory of this process alone; getrusage counts its parent's too."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1024


def measure(label: str, step: str, model: Path, scratch: Path) -> None:
    """Measure one row of the table; what the step writes is deleted after."""
    out = Path(tempfile.mkdtemp(dir=scratch, prefix="out."))
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.graph_passes", "--child", step, model, out]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    whole_s = time.perf_counter() - began
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:] or ["no message"]
        print(f"{label:<46} failed ({run.returncode}): {last[0][:80]}", flush=True)
    elif "cannot" in (took := json.loads(run.stdout)):
        print(f"{label:<46} cannot: {took['cannot']} (after {took['wall_s']:.0f} s)", flush=True)
    else:
        size = sum(file.stat().st_size for file in model.parent.iterdir())
        written = bytes_written(model.parent, out)
        print(
            f"{label:<46} {whole_s:7.1f} s {took['wall_s']:7.2f} s {took['cpu_s']:7.2f} s "
            f"{took['rss_mb']:8,.0f} MB {written / 1e6:9,.1f} MB {written / size:9.5f} x",
            flush=True,
        )
    shutil.rmtree(out)


def bytes_written(source: Path, out: Path) -> int:
    """Return the bytes of the files of `out` that are not files of `source` under another name."""
    inodes = {file.stat().st_ino for file in source.iterdir()}
    sizes = {
        file.stat().st_ino: file.stat().st_size
        for file in out.rglob("*")
        if file.is_file() and file.stat().st_ino not in inodes
    }
    return sum(sizes.values())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--with-onnx", action="store_true", help="also what loads all weights")
    parser.add_argument("--folder", type=Path, help="for models and results; needs 13 GB")
    parser.add_argument("--child", nargs=3, metavar=("STEP", "MODEL", "OUT"), help="internal")
    options = parser.parse_args()
    if options.child:
        step, model, out = options.child
        child(step, Path(model), Path(out))
        return
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="graph_passes.") as folder:
        report(Path(folder), with_onnx=options.with_onnx)


def report(scratch: Path, *, with_onnx: bool) -> None:
    """Make the models in `scratch`, and measure."""
    from benchmarks.random_encodings import write_random_encodings
    from benchmarks.random_llama import LLAMA_1B, make_random_llama
    from buildlib.graph.shape import GraphShape

    shape = GraphShape(ARS[0], CL)
    print(
        f"{'':<46} {'process':>9} {'step':>9} {'CPU':>9} {'peak':>11} {'written':>12} "
        f"{'of model':>11}"
    )
    full = make_random_llama(scratch / "full", shape=shape, **LLAMA_1B)
    label = f"AR 128 and 1, {N_PARTS} parts, heads apart"
    measure(f"ours: {label}", "our_passes", full, scratch)
    measure("onnx: load and save, graph only", "graph_only", full, scratch)
    measure("copy of all files", "plain_copy", full, scratch)
    if with_onnx:
        measure("onnx: load and save", "load_and_save", full, scratch)
        measure("onnx: extract_model, 3 parts", "extract_three", full, scratch)
    write_random_encodings(full)
    measure("ours, with encodings", "our_passes", full, scratch)
    shutil.rmtree(scratch / "full")
    for layers in (16, 32, 64):
        for width in (2048, 4096):
            sizes = LLAMA_1B.copy()
            sizes.update({"layers": layers, "hidden": width, "mlp": 4 * width})
            name = f"{layers}_{width}"
            model = make_random_llama(scratch / name, shape=shape, sparse=True, **sizes)
            gigabytes = (scratch / name / "model.safetensors").stat().st_size / 1e9
            text = f"ours: {layers} layers, {width} wide, {gigabytes:.0f} GB (sparse)"
            measure(text, "our_passes", model, scratch)


if __name__ == "__main__":
    main()
