"""Every quantization recipe of a model against float: `python3 -m tools.quantization_table`.

Each recipe quantizes the model in a process of its own, and is compared with the model in float
over held-out text: QDQ on the CPU, and compiled on the emulator. Without a model it is the
reference model, and the table goes into benchmarks/quantization.md; `--model DIR` prints that of
any checkpoint, judged by torch where it is installed (`pip install 'qnnfarm[reference]'`), over
three texts of tools/held_out (English prose, German prose, Python) or yours.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE
from buildlib.checkpoint.tokenizer import load_text_config, load_tokenizer
from buildlib.container.manifest import PRECISION
from buildlib.encodings.files import load_encodings
from buildlib.error_base import QnnfarmError
from buildlib.errors import BuildError
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.numerics.divergence import Divergence
from buildlib.numerics.evaluation import (
    ReferenceLogits,
    evaluate_model,
    record_float,
    text_perplexity,
    text_samples,
)
from buildlib.numerics.host_loop import open_onnx
from buildlib.numerics.transformers import TransformersModel
from buildlib.quantize.options import RECIPES
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.summary import summarize_quantization
from plugins.pipeline.host_model import open_host_model
from plugins.pipeline.llm import LLMPipeline
from plugins.pipeline.stage import ModelFolder
from suites.models import tiny_llama

BEGIN, END = "<!-- written by tools/quantization_table.py -->", "<!-- end of the table -->"
_DOCUMENT = Path(__file__).resolve().parents[1] / "benchmarks" / "quantization.md"
_HELD_OUT = Path(__file__).with_name("held_out")
_TARGET = "SM8750:emulator"
_NEAREST = "w4a16-rtn"
_ALSO: Mapping[str, Mapping[str, Any]] = {
    "w4a16, `*.down_proj.weight=8`": {
        "recipe": "w4a16",
        "mixed_precision": ["*.down_proj.weight=8"],
    },
}
_HEADER = (
    "recipe", "bits", "weights", "CPU time", "memory", "QDQ on the CPU", "of float", "KL", "top-1",
    "emulator", "KL there", "gap closed",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A model, and the text that judges it.

    Attributes:
        texts: files of held-out text.
        window: tokens of a window.
        windows: of each text, from all over it; None: all.
        emulator: whether the compiled model is scored too.
    """

    model: Path
    texts: tuple[Path, ...]
    window: int
    windows: int | None
    emulator: bool

    @property
    def shape(self) -> GraphShape:
        """The shape of prefill: a context of a window, and one call more."""
        ar = 32 if self.window < 256 else 128
        return GraphShape(ar, self.window + ar)

    def token_windows(self) -> list[list[int]]:
        """Return the windows of all texts, without the tokens that lead a text."""
        tokenizer = load_tokenizer(Checkpoint.load(self.model).tokenizer_path)
        windows: list[list[int]] = []
        for path in self.texts:
            text = path.read_text(encoding="utf-8")
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            starts = range(0, len(tokens) - self.window + 1, self.window)
            if not starts:
                raise SystemExit(f"{path}: {len(tokens)} tokens are fewer than a window")
            count = min(self.windows or len(starts), len(starts))
            chosen = [starts[index * len(starts) // count] for index in range(count)]
            windows += [tokens[start : start + self.window] for start in chosen]
        return windows

    def float_logits(self, folder: Path) -> ReferenceLogits:
        """Run the model in float, by our own graph."""
        checkpoint = Checkpoint.load(self.model)
        exact = export_onnx(checkpoint, self.shape, folder)
        return record_float(exact, load_text_config(self.model), self.token_windows())

    def by_torch(self) -> float | None:
        """Return the perplexity in float by torch; None where that is not installed."""
        try:
            with TransformersModel(self.model) as model:
                begin = load_text_config(self.model).begin
                return text_perplexity(model, text_samples(self.token_windows(), begin))
        except BuildError as error:
            print(f"not judged by torch: {error}", file=sys.stderr)
            return None


@dataclass
class Measured:
    """Size and quality of one recipe.

    Attributes:
        size: bytes of the integer weights.
        seconds: of the processor, on techniques and calibration.
        memory: largest resident set up to the end of calibration, in bytes.
        qdq: QDQ on the CPU against float.
        emulator: the compiled model against float; None where it was not asked for.
    """

    bits: str
    size: int
    seconds: float
    memory: int
    qdq: Divergence
    emulator: Divergence | None


def measure(options: Mapping[str, Any], subject: Subject, folder: Path) -> Measured:
    """Quantize a model by a recipe, and compare it with float."""
    own = {key: value for key, value in options.items() if key != "recipe"}
    stages: dict[str, object] = {"model_loader": {}}
    stages["quantization"] = {"recipe_name": options["recipe"], "options": own}
    if subject.emulator:
        stages["genai_builder"] = {}
    recipe = {
        "model_id_or_path": str(subject.model),
        "backend": "HTP",
        "soc_details": _TARGET,
        "cache_dir": str(folder / "cache"),
        "generator_config": {
            "sequence_length": subject.shape.ar,
            "context_length": subject.shape.cl,
        },
        "stages": stages,
    }
    pipe = LLMPipeline.from_pretrained(recipe=recipe)
    began = time.process_time()
    pipe.construct(until="quantization")
    seconds = time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model = pipe.outputs()["model"]
    assert isinstance(model, ModelFolder)  # noqa: S101  (what the stage gives)
    path, config = model.path / MODEL_FILE, load_config(model.path / CONFIG_FILE)
    qdq = apply_encodings(path, load_encodings(model.path / ENCODINGS_FILE), folder / "qdq.onnx")
    with subject.float_logits(folder / "float") as reference:
        with open_onnx(qdq, config) as loop:
            on_cpu, compiled = evaluate_model(loop, reference), None
        if subject.emulator:
            outputs = pipe.construct().outputs()
            with open_host_model(outputs, folder / "scratch") as on_emulator:
                compiled = evaluate_model(on_emulator.loop, reference)
    bits, size = summarize_quantization([qdq])[PRECISION], qdq.with_suffix(".weights")
    return Measured(str(bits), size.stat().st_size, seconds, memory, on_cpu, compiled)


def _measured(options: Mapping[str, Any], subject: Subject) -> Measured | str:
    """Measure a recipe in a process of its own, or return why it is refused."""
    asked = {"options": options, "subject": asdict(subject)}
    command = [sys.executable, "-m", "tools.quantization_table", "--one"]
    done = subprocess.run(
        [*command, json.dumps(asked, default=str)], check=True, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if "refused" in found:
        return str(found["refused"])
    for key in ("qdq", "emulator"):
        found[key] = None if found[key] is None else Divergence(**found[key])
    return Measured(**found)


def _print_one(text: str) -> None:
    """Measure one recipe and print the result as JSON."""
    asked = json.loads(text)
    texts = tuple(map(Path, asked["subject"].pop("texts")))
    model = Path(asked["subject"].pop("model"))
    subject = Subject(model, texts, **asked["subject"])
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(json.dumps(asdict(measure(asked["options"], subject, Path(folder)))))
        except QnnfarmError as error:
            print(json.dumps({"refused": str(error)}))


def _cells(name: str, one: Measured | str, nearest: Measured | None) -> list[str]:
    """Return the row of a recipe.

    Args:
        name: of the recipe.
        one: what it gives, or why it is refused.
        nearest: rounding to the nearest with the same bits, for the gap.
    """
    if isinstance(one, str):
        return [name, f"not for this model: {one}", *[""] * (len(_HEADER) - 2)]
    qdq, emulator = one.qdq, one.emulator
    return [
        name,
        one.bits,
        f"{one.size / 1e6:.2f} MB",
        f"{one.seconds:.1f} s",
        f"{one.memory / 1e6:.0f} MB",
        f"{qdq.perplexity:.3f}",
        f"{qdq.perplexity / qdq.perplexity_float - 1:+.1%}",
        f"{qdq.kl:.4f}",
        f"{qdq.top1:.1%}",
        "" if emulator is None else f"{emulator.perplexity:.3f}",
        "" if emulator is None else f"{emulator.kl:.4f}",
        "" if nearest is None or one.bits != nearest.bits else gap_closed(one, nearest),
    ]


def gap_closed(one: Measured, nearest: Measured) -> str:
    """Return the part of the gap to float that a recipe closes, with its standard error.

    The errors of both losses count as independent. They are not, as the text is the same, so the
    true one is smaller.
    """
    ours, theirs = one.qdq, nearest.qdq
    rise = theirs.loss - theirs.loss_float
    left = (ours.loss - ours.loss_float) / rise
    error = math.hypot(ours.error, left * theirs.error) / rise
    return "0 %" if one == nearest else f"{1 - left:.0%} ± {error:.0%}".replace("%", " %")


def main() -> None:
    """Measure recipes, print the table, and write that of the reference model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: the reference model")
    parser.add_argument("--text", type=Path, nargs="+", help="files of held-out text")
    parser.add_argument("--window", type=int, help="tokens of a window; default: 128, or 512")
    parser.add_argument("--windows", type=int, help="windows of each text; default: all, or one")
    parser.add_argument("--recipes", nargs="+", help="a name, or options as JSON; default: all")
    parser.add_argument("--emulator", action="store_true", help="score the compiled model as well")
    parser.add_argument("--jobs", type=int, default=1, help="recipes to measure at once")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        _print_one(asked.one)
        return
    own = asked.model is None
    subject = Subject(
        (tiny_llama.folder() if own else asked.model).absolute(),
        tuple(asked.text or _texts(own=own)),
        asked.window or (128 if own else 512),
        asked.windows or (None if own else 1),
        own or asked.emulator,
    )
    print(f"{subject.model.name}, {_said(subject)}", flush=True)
    exact = None if own else subject.by_torch()
    print("" if exact is None else f"float by torch: {exact:.3f}", " | ".join(_HEADER), sep="\n")
    found: dict[str, Measured | str] = {}
    recipes = {} if asked.recipes else dict(_ALSO)
    recipes = dict(map(_recipe, asked.recipes or RECIPES)) | recipes
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = pool.map(lambda one: _measured(one, subject), recipes.values())
        for name, one in zip(recipes, results, strict=True):
            found[name] = one
            print(" | ".join(_cells(name, one, None)), flush=True)
    text = _table(found, subject)
    print(f"\n{text}")
    if own and not asked.recipes:
        _write(text)


def _texts(*, own: bool) -> list[Path]:
    return [tiny_llama.folder() / "text/heldout.txt"] if own else sorted(_HELD_OUT.glob("*.txt"))


def _recipe(text: str) -> tuple[str, Mapping[str, Any]]:
    """Return the label and the options of a recipe by its name, or by options as JSON."""
    if not text.startswith("{"):
        return f"`{text}`", {"recipe": text}
    options = json.loads(text)
    others = ", ".join(f"`{key}={value}`" for key, value in options.items() if key != "recipe")
    return f"{options['recipe']}, {others}", options


def _said(subject: Subject) -> str:
    windows = subject.token_windows()
    return f"{sum(map(len, windows)):,} tokens in windows of {subject.window}:"


def _table(found: Mapping[str, Measured | str], subject: Subject) -> str:
    """Return the table with its caption, as Markdown.

    Args:
        found: by the name of a recipe.
    """
    nearest = found.get(f"`{_NEAREST}`")
    rows = [list(_HEADER), ["---"] * len(_HEADER)]
    plain = nearest if isinstance(nearest, Measured) else None
    rows += [_cells(name, one, plain) for name, one in found.items()]
    measured = next((one for one in found.values() if isinstance(one, Measured)), None)
    if measured is not None:
        exact = f"{measured.qdq.perplexity_float:.3f}"
        rows.append(["float", "", "", "", "", exact, *[""] * (len(_HEADER) - 6)])
    return "\n".join([_said(subject), "", *(f"| {' | '.join(row)} |" for row in rows)])


def _write(text: str) -> None:
    """Write the table into the document."""
    document = _DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = document.partition(BEGIN)
    after = rest.partition(END)[2]
    _DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
