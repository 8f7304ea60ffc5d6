"""`qnnfarm pipeline`: one recipe from a checkpoint to measured text.

Stages are imported after the look at finished runs, so that a run with nothing to do takes no
longer than that look.
"""

from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import typer
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from buildlib.sizes import size_text
from harness.cli.arguments import Json, MaxKl, ReferenceWith, read_text
from harness.cli.completion import complete_targets
from harness.cli.dialog_options import System, UseChat
from harness.cli.progress import ModelBar, StageBar, describe_stage, stage_time
from harness.console import Row, answers, print_json, print_remark, print_rows, progress
from harness.errors import WrongUseError
from harness.workloads.verify import answer
from plugins.pipeline.defaults import recipe_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from plugins.pipeline.llm import LLMPipeline
    from plugins.pipeline.observers import StageEvent

app = typer.Typer(
    help="One recipe from a checkpoint to measured text: load, quantize, build, evaluate.",
    no_args_is_help=True,
)

Device = Annotated[
    str | None,
    typer.Option(
        help="Device that evaluates and generates: SERIAL, SERIAL@HOST, virtual:NAME. Without it "
        "this host does."
    ),
]
Recipe = Annotated[Path, typer.Argument(help="The recipe, a YAML file.")]
Model = Annotated[
    str | None,
    typer.Option(help="Folder of the model, or its id at the hub, in place of the recipe's."),
]
Until = Annotated[
    str | None, typer.Option(metavar="STAGE", help="The last stage to run; by default all.")
]
Text = Annotated[
    Path | None,
    typer.Option(help="Text to measure on; by default that of the recipe's first metric."),
]
Windows = Annotated[
    int | None,
    typer.Option(
        min=1, help="Pieces of the text, each of the context length; by default as the metric says."
    ),
]


@app.command("run")
def run(
    recipe: Recipe,
    model: Model = None,
    until: Until = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to generate from at the end.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 32,
    chat: UseChat = False,
    system: System = None,
    device: Device = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the output of the last stage: the container."),
    ] = None,
    json: Json = False,
) -> None:
    """Run a recipe's stages, evaluate its metrics, and generate from a prompt.

    Stages that nothing has changed for come from the cache, so a run that was killed goes on
    where it was.

    Example: qnnfarm pipeline run recipe.yaml --prompt "In the beginning"
    """
    pipe = _open(model, recipe)
    pipe.check_metrics()  # before stages that take hours
    _construct(pipe, until)
    document = _document(pipe)
    if not json:
        _print_stages(document)
    if pipe.config.settings.evaluator_config is not None:
        print_remark(f"evaluating on {device or 'this host'}")
        document["metrics"] = pipe.evaluate(device=device)
        if not json:
            _print_metrics(document)
    if prompt is not None:
        answer = pipe.generate(prompt, device, max_tokens=max_tokens, chat=chat, system=system)
        document["answer"] = asdict(answer)
        if not json:
            answer.print()
    folder = None if out is None else pipe.export(out)
    document["out"] = None if folder is None else str(folder)
    if json:
        print_json(document)
    elif folder is not None:
        _print_out(document)


@app.command("verify")
def verify(
    recipe: Recipe,
    model: Model = None,
    until: Until = None,
    text: Text = None,
    windows: Windows = None,
    reference_with: ReferenceWith = "onnx",
    max_kl: MaxKl = None,
    json: Json = False,
) -> None:
    """Run a recipe's stages, and compare the output of each with the model in float.

    All run on this host, the container on the HTP emulator. With `--reference-with transformers`
    its reading of the model judges ours, too. Exits 1 if a stage is outside of its bound, and names
    the first. `qnnfarm verify` compares the container on a device.

    Example: qnnfarm pipeline verify recipe.yaml --max-kl 0.01
    """
    content = None if text is None else read_text(text)
    pipe = _open(model, recipe)
    pipe.text_to_compare(content, windows)  # refuses before stages run
    _construct(pipe, until)
    found = pipe.verify(content, windows, max_kl=max_kl, reference_with=reference_with)
    answer(found, pipe.model_name, json=json)


@app.command("sensitivity")
def sensitivity(
    recipe: Recipe,
    model: Model = None,
    text: Text = None,
    windows: Windows = None,
    by: Annotated[
        Literal["tensor", "layer"] | None,
        typer.Option(
            help="Rank tensors, or weights, keys, values, hidden states and other activations of "
            "each layer; the default for large models."
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Rank weights alone, which takes less time.")
    ] = False,
    both_ways: Annotated[
        bool,
        typer.Option(
            "--both-ways", help="Measure too what the model gains if one alone is left in float."
        ),
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Rows of the ranking to print.")] = 20,
    json: Json = False,
) -> None:
    """Rank tensors or layers by the cost of their quantization.

    Each is quantized alone, on this host, with all else in float: SQNR of the tensor and of its
    layer's output, and the KL divergence of the logits. The option of quantization that gives it
    more bits stands beside it.

    Example: qnnfarm pipeline sensitivity recipe.yaml --by layer
    """
    from buildlib.quantize.loss import UNIT_KINDS
    from plugins.pipeline.sensitivity import last_before_builder, rank_pipeline

    content = None if text is None else read_text(text)
    pipe = _open(model, recipe)
    pipe.text_to_compare(content, windows)  # refuses before stages run
    _construct(pipe, last_before_builder(pipe))
    with _ranking() as on_segment:
        result = rank_pipeline(
            pipe,
            content,
            windows,
            granularity=by,
            kinds=("weight",) if weights_only else UNIT_KINDS,
            both_ways=both_ways,
            progress=on_segment,
        )
    if json:
        print_json({"model": pipe.model_name, **result.as_document()})
    else:
        result.print(top)


@app.command("stages")
def stages(json: Json = False) -> None:
    """List the stages that recipes can name, with the keys of their sections.

    Example: qnnfarm pipeline stages
    """
    from plugins.pipeline.registry import StageRegistry

    rows, documents = [], []
    for name, stage in StageRegistry().stages().items():
        summary = (stage.__doc__ or "").strip().split("\n")[0]
        keys = list(stage.Config.model_fields)
        rows.append(Row([name, summary], [f"keys: {', '.join(keys) or 'none'}"]))
        documents.append({"name": name, "summary": summary, "keys": keys})
    if json:
        print_json(documents)
    else:
        print_rows(("stage", "work"), rows)


@app.command("init")
def init(
    model: Annotated[str, typer.Argument(help="Folder of the model, or its id at the hub.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("recipe.yaml"),
    target: Annotated[
        str,
        typer.Option(
            help="SoC: `SM8750` is the phone, `SM8750:emulator` needs none.",
            autocompletion=complete_targets,
        ),
    ] = "SM8750:emulator",
) -> None:
    """Write a first recipe for a model, with remarks on its settings.

    Example: qnnfarm pipeline init MODEL_DIR
    """
    if out.exists():
        raise WrongUseError(f"{out} is there already; name another file with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(recipe_text(model, target), encoding="utf-8")
    answers().print(f"{out}: run it with `qnnfarm pipeline run {out} --prompt TEXT`")


def _open(model: str | None, recipe: Path) -> "LLMPipeline":
    """Make the pipeline of a recipe, with a progress bar while its GGUF is read."""
    from plugins.pipeline.llm import LLMPipeline

    with ModelBar():
        return LLMPipeline.from_pretrained(model, recipe=recipe)


def _construct(pipe: "LLMPipeline", until: str | None) -> None:
    with _PipelineBar(pipe.config.settings.log_level) as bar:
        pipe.add_observer(bar)
        pipe.construct(until=until)


@contextmanager
def _ranking() -> "Iterator[Callable[[int, int], None]]":
    """Show a progress bar of a ranking on stderr; yield its update (segments run, all)."""
    print_remark("quantizing tensors one by one")
    with progress(
        SpinnerColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f} runs of a layer", markup=False),
        TimeElapsedColumn(),
    ) as bar:
        task = bar.add_task("ranking", total=1)
        yield lambda count, total: bar.update(task, completed=count, total=total)


class _PipelineBar(StageBar):
    """A progress bar over a pipeline's stages.

    Args:
        level: `debug` tells every step, `info` every stage, the others none.
    """

    def __init__(self, level: str) -> None:
        super().__init__("pipeline")
        self._level = level

    def __enter__(self) -> Self:
        return super().__enter__() if self._level in {"debug", "info"} else self

    def __call__(self, event: "StageEvent") -> None:
        """Show an event."""
        from plugins.pipeline.observers import StageFinished, StageStarted, StageStep

        tells = self._level in {"debug", "info"}
        if isinstance(event, StageStarted):
            self.update(
                completed=event.number - 1, total=event.total, title=event.stage, description=""
            )
        elif isinstance(event, StageStep):
            text = describe_stage(event.record)
            self.update(description=text)
            if self._level == "debug":
                self.print(f"{event.stage}: {text}")
        elif isinstance(event, StageFinished):
            self.update(completed=event.number)
            if tells and not self.is_terminal:
                time = stage_time(event.seconds, event.reused)
                self.print(f"{event.number}/{event.total} {event.stage} ({time})")
        elif tells:  # its error ends the command
            self.print(f"{event.stage} failed; finished stages are kept")


def _document(pipe: "LLMPipeline") -> dict[str, Any]:
    profiles = pipe.profiler.profiles if pipe.profiler is not None else []
    return {
        "model": pipe.model_name,
        "manifest": str(pipe.manifest_path),
        "completed": list(pipe.completed),
        "stages": [asdict(one) for one in profiles],
        "metrics": {},
        "answer": None,
        "out": None,
    }


def _print_stages(document: "Mapping[str, Any]") -> None:
    if not document["stages"]:
        return
    rows = [
        [
            one["stage"],
            stage_time(one["seconds"], one["reused"]),
            size_text(one["peak_memory_bytes"]),
            size_text(one["output_bytes"]),
        ]
        for one in document["stages"]
    ]  # fmt: skip
    headings = ("stage", "time", "peak memory", "output")
    print_rows(headings, rows, right=set(headings[1:]))


def _print_metrics(document: "Mapping[str, Any]") -> None:
    metrics = document["metrics"]
    for name, score in metrics.items():
        if name.endswith("_error") and name.removesuffix("_error") in metrics:
            continue
        error = f" ± {metrics[f'{name}_error']:.2g}" if f"{name}_error" in metrics else ""
        answers().print(f"{name} {score:.4g}{error} after {document['completed'][-1]}")


def _print_out(document: "Mapping[str, Any]") -> None:
    if document["out"] is not None:
        answers().print(f"{document['out']}: the output of {document['completed'][-1]}")
