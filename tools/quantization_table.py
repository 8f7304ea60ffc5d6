"""Write the table of docs/quantization.md: `python3 -m tools.quantization_table`.

Each recipe quantizes the reference model in a process and on a core of its own, and is compared
with the model in float over all held-out text: the changed weights in float, QDQ on the CPU,
compiled on the emulator. `--jobs N` runs so many at once; `--windows N` takes only so much text.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buildlib.builder.runner import StageRecord
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.tokenizer import load_tokenizer
from buildlib.errors import InvalidOptionError
from buildlib.genai import GenAIBuilderFactory
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.numerics.divergence import Divergence
from buildlib.numerics.emulator import emulator_chains
from buildlib.numerics.evaluation import FloatLogits, evaluate_model, record_float
from buildlib.numerics.host_loop import HostLoop
from buildlib.numerics.runners import OnnxRunner, PartRunner
from buildlib.quantize.options import RECIPES
from buildlib.targets import parse_target
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from suites.models import tiny_llama

BEGIN, END = "<!-- written by tools/quantization_table.py -->", "<!-- end of the table -->"
_DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "quantization.md"
_SHAPE, _TARGET = GraphShape(64, 192), "SM8750:emulator"
_WINDOW = 128
_NEAREST = "w4a16-rtn"
_ALSO: Mapping[str, Mapping[str, Any]] = {
    "w4a16, `*.down_proj.weight=8`": {
        "recipe": "w4a16",
        "mixed_precision": ["*.down_proj.weight=8"],
    },
}
_HEADER = (
    "recipe", "bits", "weights", "CPU time", "memory", "weights in float", "QDQ on the CPU",
    "emulator", "gap closed", "KL", "top-1",
)  # fmt: skip


@dataclass
class Measured:
    """Size and quality of one recipe.

    Attributes:
        size: bytes of the integer weights.
        seconds: of the processor, on techniques and calibration.
        memory: largest resident set up to the end of calibration, in bytes.
        perplexity: of the changed model in float, as QDQ, and on the emulator.
        rise, error: of the loss on the emulator over that in float, and its standard error.
        kl: of the emulator from the model in float, in nats.
        top1: part of the positions where both find the same token most probable.
    """

    bits: str
    size: int
    seconds: float
    memory: int
    perplexity: tuple[float, float, float]
    rise: float
    error: float
    kl: float
    top1: float


def measure(options: Mapping[str, Any], windows: int | None, folder: Path) -> Measured:
    """Build the reference model by a recipe, and compare its stages with float."""
    checkpoint = Checkpoint.load(tiny_llama.folder())
    builder = GenAIBuilderFactory.create(tiny_llama.folder(), cache_root=folder / "cache")
    shapes = {
        "arn_cl_options.auto_regression_number": [1, _SHAPE.ar],
        "arn_cl_options.context_length": [_SHAPE.cl],
    }
    builder.set_targets([_TARGET])
    builder.set_options(shapes | {f"quantization.{key}": one for key, one in options.items()})
    seconds, memory, began = 0.0, 0, time.process_time()

    def note(record: StageRecord) -> None:
        nonlocal seconds, memory
        if record.operation in {"export", "load", "optimize"} or record.subject == "encodings":
            seconds = time.process_time() - began
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    build = builder.plan()
    outputs = build.outputs(note)
    changed = outputs.export / "model.onnx"
    qdq = outputs.qdq_parts[_SHAPE]
    soc = parse_target(_TARGET).soc.soc_model
    emulator = emulator_chains(outputs.binaries, OrtQnnToolchain(), soc_model=soc, cl=_SHAPE.cl)
    exact = export_onnx(checkpoint, _SHAPE, folder / "float")
    with record_float(exact, checkpoint.config, held_out(checkpoint, windows)) as reference:
        found = [
            _evaluate(checkpoint, {_SHAPE.ar: [OnnxRunner(changed)]}, reference),
            _evaluate(checkpoint, {_SHAPE.ar: [OnnxRunner(path) for path in qdq]}, reference),
            _evaluate(checkpoint, emulator, reference),
        ]
    return Measured(
        build.run().precision or "",
        sum(path.stat().st_size for path in {p.parent for p in qdq}.pop().glob("*.weights")),
        seconds,
        memory,
        (found[0].perplexity, found[1].perplexity, found[2].perplexity),
        found[2].loss - found[2].loss_float,
        found[2].error,
        found[2].kl,
        found[2].top1,
    )


def held_out(checkpoint: Checkpoint, windows: int | None = None) -> list[list[int]]:
    """Return all of the held-out text in windows, or so many of them from all over it."""
    tokens = load_tokenizer(checkpoint.tokenizer_path).encode(tiny_llama.heldout_text()).ids
    starts = range(0, len(tokens) - _WINDOW + 1, _WINDOW)
    count = min(windows or len(starts), len(starts))
    chosen = [starts[index * len(starts) // count] for index in range(count)]
    return [tokens[start : start + _WINDOW] for start in chosen]


def _evaluate(
    checkpoint: Checkpoint, chains: Mapping[int, Sequence[PartRunner]], reference: FloatLogits
) -> Divergence:
    with HostLoop(chains, checkpoint.config) as loop:
        return evaluate_model(loop, reference)


def _measured(options: Mapping[str, Any], windows: int | None) -> Measured | str:
    """Measure a recipe in a process of its own, or return why it is refused."""
    arguments = [json.dumps(options), *([] if windows is None else [str(windows)])]
    command = [sys.executable, "-m", "tools.quantization_table", "--one", *arguments]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    found = json.loads(done.stdout.splitlines()[-1])
    return str(found["refused"]) if "refused" in found else Measured(**found)


def _cells(name: str, one: Measured | str, nearest: Measured | None) -> list[str]:
    """Return the row of a recipe.

    Args:
        name: of the recipe.
        one: what it gives, or why it is refused.
        nearest: rounding to the nearest with the same bits, for the gap.
    """
    if isinstance(one, str):
        return [name, f"not for this model: {one}", *[""] * (len(_HEADER) - 2)]
    return [
        name,
        one.bits,
        f"{one.size / 1e6:.2f} MB",
        f"{one.seconds:.1f} s",
        f"{one.memory / 1e6:.0f} MB",
        *(f"{each:.3f}" for each in one.perplexity),
        "" if nearest is None or one.bits != nearest.bits else gap_closed(one, nearest),
        f"{one.kl:.4f}",
        f"{one.top1:.1%}",
    ]


def gap_closed(one: Measured, nearest: Measured) -> str:
    """Return the part of the gap to float that a recipe closes, with its standard error.

    The errors of both losses count as independent. They are not, as the text is the same, so the
    true one is smaller.
    """
    left = one.rise / nearest.rise
    error = math.hypot(one.error, left * nearest.error) / nearest.rise
    return "0 %" if one == nearest else f"{1 - left:.0%} ± {error:.0%}".replace("%", " %")


def _print_one(options: Mapping[str, Any], windows: int | None) -> None:
    """Measure one recipe and print the result as JSON."""
    os.sched_setaffinity(0, {os.getpid() % (os.cpu_count() or 1)})
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(json.dumps(asdict(measure(options, windows, Path(folder)))))
        except InvalidOptionError as error:
            print(json.dumps({"refused": error.reason.partition(",")[0]}))


def main() -> None:
    """Measure all recipes and write the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="recipes to measure at once")
    parser.add_argument("--windows", type=int, help=f"windows of {_WINDOW} tokens; default: all")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        _print_one(json.loads(asked.one[0]), int(asked.one[1]) if asked.one[1:] else None)
        return
    recipes = {f"`{name}`": {"recipe": name} for name in RECIPES} | dict(_ALSO)
    found: dict[str, Measured | str] = {}
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = pool.map(lambda one: _measured(one, asked.windows), recipes.values())
        for name, one in zip(recipes, results, strict=True):
            found[name] = one
            print(" | ".join(_cells(name, one, None)), flush=True)
    checkpoint = Checkpoint.load(tiny_llama.folder())
    windows = held_out(checkpoint, asked.windows)
    with tempfile.TemporaryDirectory() as folder:
        path = export_onnx(checkpoint, _SHAPE, Path(folder))
        with record_float(path, checkpoint.config, windows) as reference:
            exact = reference.own().perplexity
    write_table(found, exact, sum(map(len, windows)))


def write_table(found: Mapping[str, Measured | str], exact: float, n_tokens: int) -> None:
    """Write the table into the document.

    Args:
        found: by the name of a recipe.
        exact: perplexity in float.
        n_tokens: that were scored.
    """
    nearest = found[f"`{_NEAREST}`"]
    if isinstance(nearest, str):
        raise SystemExit(f"{_NEAREST} cannot be measured: {nearest}")
    rows = [list(_HEADER), ["---"] * len(_HEADER)]
    rows += [_cells(name, one, nearest) for name, one in found.items()]
    rows.append(["float", "", "", "", "", f"{exact:.3f}", *[""] * (len(_HEADER) - 6)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    said = f"{n_tokens:,} tokens in windows of {_WINDOW}:"
    text = _DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    _DOCUMENT.write_text(f"{before}{BEGIN}\n\n{said}\n\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
