"""`qnnfarm train`: forecast tokens and draft heads for speculation, trained with torch.

Torch comes with an extra, and is imported when a training begins.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from harness.cli.arguments import Json, with_groups
from harness.console import answers, print_json, print_remark, progress
from harness.errors import WrongUseError, one_line
from harness.words import pluralize

if TYPE_CHECKING:
    from plugins.speculation.descent import Descent, Watcher
    from plugins.speculation.frozen_model import FrozenModel

app = typer.Typer(
    help="Train what speculation needs beside a model, which itself stays as it is.",
    no_args_is_help=True,
)

_LINE_EVERY_S = 30.0


@dataclass(frozen=True)
class TrainOptions:
    """Model, text and budget of a training."""

    model_dir: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint in Hugging Face layout, of a family that transformers has."
        ),
    ]
    text: Annotated[
        Path,
        typer.Option(help="Text like what the model is to write, in UTF-8; some 100 kB do."),
    ]
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Most time to train, with that before an interruption.")
    ] = 8.0
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Most steps. Trainings that these end, not the time, are repeatable."
        ),
    ] = 1000
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random draws.")] = 1
    device: Annotated[
        str | None,
        typer.Option(help="Device of torch: cpu, cuda, cuda:1; by default a GPU if it has one."),
    ] = None


@app.command("forecast")
@with_groups
def forecast(
    options: TrainOptions,
    *,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("ssd_tensor.safetensors"),
    tokens: Annotated[
        int, typer.Option(min=1, max=16, help="Forecast tokens: `forecast_token_count`.")
    ] = 4,
    prefix: Annotated[
        int, typer.Option(min=1, max=64, help="Length of the prefix: `forecast_prefix`.")
    ] = 16,
    json: Json = False,
) -> None:
    """Train forecast tokens and their prefix, for self-speculative decoding (SSD).

    Build with the file: `-O speculative_config.ssd_tensor_file=FILE`. A training that was
    interrupted goes on where the same command is given again.

    Example: qnnfarm train forecast MODEL_DIR --text FILE --minutes 8
    """
    if out.suffix != ".safetensors" or out.is_dir():
        raise WrongUseError(f"{out} cannot be written: name a file that ends in .safetensors")

    def train(model: "FrozenModel", descent: "Descent", watcher: "Watcher") -> float:
        from plugins.speculation.train_forecast import ForecastRecipe, train_forecast

        recipe = ForecastRecipe(forecast_tokens=tokens, prefix_length=prefix)
        return train_forecast(model, recipe, descent, watcher, out)

    settings = {"kind": "forecast", "tokens": tokens, "prefix": prefix}
    _run(options, out, settings, train, f"speculative_config.ssd_tensor_file={out}", json=json)


@app.command("draft")
@with_groups
def draft(
    options: TrainOptions,
    *,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("eaglet"),
    json: Json = False,
) -> None:
    """Train a draft head on the model's hidden states, for Eaglet.

    Build with its ONNX: `-O speculative_config.draft_model_path=FOLDER/draft_model.onnx`. A
    training that was interrupted goes on where the same command is given again.

    Example: qnnfarm train draft MODEL_DIR --text FILE --out eaglet
    """
    head = out / "draft_model.onnx"
    if out.exists() and not head.exists() and (out.is_file() or any(out.iterdir())):
        raise WrongUseError(f"{out} holds something else than a draft head: name another folder")

    def train(model: "FrozenModel", descent: "Descent", watcher: "Watcher") -> float:
        from plugins.speculation.train_draft import DraftRecipe, train_draft

        trained, rate = train_draft(model, DraftRecipe(), descent, watcher)
        trained.save(options.model_dir, out)
        return rate

    option = f"speculative_config.draft_model_path={head}"
    _run(options, out, {"kind": "draft"}, train, option, json=json)


def _run(
    options: TrainOptions,
    out: Path,
    settings: Mapping[str, object],
    train: "Callable[[FrozenModel, Descent, Watcher], float]",
    option: str,
    *,
    json: bool,
) -> None:
    """Train, with progress on stderr, and print the file and its quality.

    Args:
        settings: of this kind of training; see `_begin`.
        train: trains and writes; returns tokens accepted a call.
        option: of the build that reads the file.
    """
    packages = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if packages:
        reason = f"training needs {' and '.join(packages)}, which is not installed"
        raise WrongUseError(f"{reason}: pip install 'qnnfarm[train]'")
    with progress(
        TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    ) as bar:
        watcher = _Shown(bar, bar.add_task("loading", total=1.0))
        model, descent = _begin(options, out, settings)
        rate = train(model, descent, watcher)
        descent.finish()
    if json:
        print_json(
            {
                "path": str(out),
                "steps": descent.step,
                "seconds": round(descent.elapsed, 1),
                "tokens_per_call": round(rate, 3),
            }
        )
        return
    answers().print(
        f"{out}: {pluralize(descent.step, 'step')} in {descent.elapsed:.0f} s, about "
        f"{rate:.2f} tokens a call on text that it did not learn from; build with `-O {option}`"
    )


def _begin(
    options: TrainOptions, out: Path, settings: Mapping[str, object]
) -> "tuple[FrozenModel, Descent]":
    """Load the model, and go on with an interrupted training.

    Args:
        settings: that a training which goes on must have in common with its beginning.
    """
    import torch

    from plugins.speculation.descent import Budget, Descent
    from plugins.speculation.frozen_model import FrozenModel

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter of a torch built without CUDA
        reason = f"torch has no device {device!r} here ({one_line(str(error), 200)})"
        raise WrongUseError(f"{reason}: --device cpu always works") from error
    model = FrozenModel.load(options.model_dir, options.text, device)
    files = {
        path.name: [path.stat().st_size, path.stat().st_mtime_ns]
        for path in (options.text, *sorted(options.model_dir.glob("*.safetensors")))
    }
    budget = Budget(options.steps, 60 * options.minutes, options.seed)
    place = out.absolute().with_name(f"{out.absolute().name}.training")
    descent = Descent(place, {**settings, "seed": options.seed, "text or model": files}, budget)
    if descent.step:
        print_remark(f"goes on after step {descent.step}, from {place}")
    return model, descent


class _Shown:
    """`Watcher` that shows a bar on a terminal, and else a line now and then."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task, self._told = bar, task, time.monotonic()

    def on_texts(self, done: int, total: int) -> None:
        """See `Watcher`."""
        self._show(done / total, f"the model writes texts: {done} of {total}")

    def on_step(self, share: float, step: int, words: str) -> None:
        """See `Watcher`."""
        self._show(share, f"step {step}, {words}")

    def _show(self, share: float, words: str) -> None:
        self._bar.update(self._task, completed=share, description=words)
        if self._bar.disable and time.monotonic() - self._told >= _LINE_EVERY_S:
            self._told = time.monotonic()
            print_remark(f"{share:4.0%}  {words}")
