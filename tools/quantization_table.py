"""Write the table of docs/quantization.md: `python3 -m tools.quantization_table`.

Each recipe quantizes the reference model in a process and on a core of its own, and is compared
with the model in float over held-out text: the changed weights in float, QDQ on the CPU, compiled
on the emulator. `--jobs N` runs so many at once.
"""

import json
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

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.tokenizer import load_tokenizer
from buildlib.errors import InvalidOptionError
from buildlib.genai import GenAIBuilderFactory
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.pipeline.runner import StageRecord
from buildlib.quantize.options import RECIPES
from buildlib.reference.divergence import Divergence
from buildlib.reference.emulator import emulator_chains
from buildlib.reference.evaluation import FloatLogits, evaluate_model, record_float
from buildlib.reference.host_loop import HostLoop
from buildlib.reference.runners import OnnxRunner, PartRunner
from buildlib.targets import parse_target
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from suites.models import tiny_llama

BEGIN, END = "<!-- written by tools/quantization_table.py -->", "<!-- end of the table -->"
_DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "quantization.md"
_SHAPE, _TARGET = GraphShape(64, 192), "SM8750:emulator"
_WINDOW, _WINDOWS = 128, 64
_ALSO: Mapping[str, Mapping[str, Any]] = {
    "w4a16, `*.down_proj.weight=8`": {
        "recipe": "w4a16",
        "mixed_precision": ["*.down_proj.weight=8"],
    },
}
_HEADER = (
    "recipe", "bits", "weights", "CPU time", "memory", "weights in float", "QDQ on the CPU",
    "emulator", "KL", "top-1",
)  # fmt: skip


@dataclass
class Measured:
    """Size and quality of one recipe.

    Attributes:
        size: bytes of the integer weights.
        seconds: of the processor, on techniques and calibration.
        memory: largest resident set up to the end of calibration, in bytes.
        perplexity: of the changed model in float, as QDQ, and on the emulator.
        kl: of the emulator from the model in float, in nats.
        top1: part of the positions where both find the same token most probable.
    """

    bits: str
    size: int
    seconds: float
    memory: int
    perplexity: tuple[float, float, float]
    kl: float
    top1: float


def measure(options: Mapping[str, Any], folder: Path) -> Measured:
    """Build the reference model by a recipe, and compare its stages with float."""
    checkpoint = Checkpoint.load(tiny_llama.folder())
    reference = record_float(
        export_onnx(checkpoint, _SHAPE, folder / "float"), checkpoint.config, held_out(checkpoint)
    )
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
    with reference:
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
        found[2].kl,
        found[2].top1,
    )


def held_out(checkpoint: Checkpoint) -> list[list[int]]:
    """Return windows from all over the held-out text."""
    tokens = load_tokenizer(checkpoint.tokenizer_path).encode(tiny_llama.heldout_text()).ids
    last = len(tokens) - _WINDOW
    starts = [last * index // (_WINDOWS - 1) for index in range(_WINDOWS)]
    return [tokens[start : start + _WINDOW] for start in starts]


def _evaluate(
    checkpoint: Checkpoint, chains: Mapping[int, Sequence[PartRunner]], reference: FloatLogits
) -> Divergence:
    with HostLoop(chains, checkpoint.config) as loop:
        return evaluate_model(loop, reference)


def _row(name: str, options: Mapping[str, Any]) -> list[str]:
    """Measure a recipe in a process of its own; return the cells of its row."""
    command = [sys.executable, "-m", "tools.quantization_table", json.dumps(options)]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    found = json.loads(done.stdout.splitlines()[-1])
    if "refused" in found:
        return [name, f"not for this model: {found['refused']}", *[""] * (len(_HEADER) - 2)]
    one = Measured(**found)
    return [
        name,
        one.bits,
        f"{one.size / 1e6:.2f} MB",
        f"{one.seconds:.0f} s",
        f"{one.memory / 1e6:.0f} MB",
        *(f"{each:.3f}" for each in one.perplexity),
        f"{one.kl:.4f}",
        f"{one.top1:.1%}",
    ]


def main() -> None:
    """Measure all recipes and write the table, or one and print it."""
    jobs = int(sys.argv[2]) if sys.argv[1:2] == ["--jobs"] else 1
    if len(sys.argv) == 2:
        core = os.getpid() % (os.cpu_count() or 1)
        os.sched_setaffinity(0, {core})
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(json.dumps(asdict(measure(json.loads(sys.argv[1]), Path(folder)))))
            except InvalidOptionError as error:
                print(json.dumps({"refused": error.reason.partition(",")[0]}))
        return
    recipes = {f"`{name}`": {"recipe": name} for name in RECIPES} | dict(_ALSO)
    lines = [f"| {' | '.join(_HEADER)} |", f"| {' | '.join('---' for _ in _HEADER)} |"]
    with ThreadPoolExecutor(jobs) as pool:
        for cells in pool.map(_row, recipes, recipes.values()):
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    checkpoint = Checkpoint.load(tiny_llama.folder())
    with tempfile.TemporaryDirectory() as folder:
        path = export_onnx(checkpoint, _SHAPE, Path(folder))
        with record_float(path, checkpoint.config, held_out(checkpoint)) as reference:
            exact = reference.own().perplexity
    lines.append(f"| float | | | | | {exact:.3f} | | | | |")
    text = _DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    table = "\n".join(lines)
    _DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
