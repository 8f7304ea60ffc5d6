"""`qnnfarm evaluate`: task files of questions or instructions, on a device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from harness.cli.arguments import (
    DEFAULT_RUNTIME,
    ContainerDir,
    Json,
    KeepIn,
    ReferenceWith,
    RunOptions,
    Runtime,
    absolute,
    find_reference,
    with_groups,
)
from harness.cli.dialog_options import System, UseChat
from harness.cli.recorded_session import open_recorded_session, with_error
from harness.console import answers, print_json, print_remark, progress, visible
from harness.results.metrics import METRICS
from harness.runtimes.registry import open_model
from harness.words import pluralize
from harness.workloads.session import Session
from plugins.evaluation.tasks import read_task, task_files
from plugins.evaluation.workload import Evaluate, Evaluation


@with_groups
def evaluate(
    container_dir: ContainerDir,
    tasks: Annotated[
        list[Path],
        typer.Argument(
            help="Task files, or folders of them: JSON lines in the form of MMLU, of "
            "HellaSwag or of IFEval."
        ),
    ],
    *,
    runtime: Runtime = DEFAULT_RUNTIME,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first rows of each file.")
    ] = None,
    few_shot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A task file whose questions stand, with their answers, before each question of "
            "the same subject.",
        ),
    ] = None,
    chat: UseChat = False,
    system: System = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of an answer that is checked; by default 256."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT_DIR",
            help="The checkpoint that the container was built from, as `build` takes it: it "
            "answers the same questions in float on this host.",
        ),
    ] = None,
    reference_with: ReferenceWith = "onnx",
    min_accuracy: Annotated[
        float | None,
        typer.Option(
            "--min",
            min=0,
            max=1,
            metavar="SHARE",
            help="Fail if the accuracy of a task is below this share, as 0.5.",
        ),
    ] = None,
    db: KeepIn = None,
    options: RunOptions,
    json: Json = False,
) -> None:
    """Score tasks on a device: choices by their log-likelihood, instructions by checks.

    Exits 1 where the accuracy of a task is below `--min`.

    Example: qnnfarm evaluate CONTAINER_DIR suites/tasks --limit 50
    """
    files = task_files(tasks)
    workloads = [
        Evaluate.of(
            task=absolute(file),
            limit=limit,
            few_shot=absolute(few_shot),
            chat=chat or None,
            system=system,
            max_tokens=max_tokens,
            reference=reference,
            reference_with=None if reference_with == "onnx" else reference_with,
            min=min_accuracy,
        )
        for file in files
    ]
    model = open_model(container_dir, runtime)
    for file, workload in zip(files, workloads, strict=True):
        read_task(file)
        workload.check(model)
    find_reference(reference)
    documents: list[dict[str, object]] = []
    with open_recorded_session(model, options, command="evaluate", db=db) as (session, recording):
        for workload in workloads:
            with _showing_rows(session, workload.task):
                result = workload.run(session, recording).output
            if not json:
                _show(result, session.device_label)
            documents.append(
                {
                    "task": result.task.name,
                    "rows": len(result.task.rows),
                    "left_out": result.task.left_out,
                    **result.values,
                }
            )
        if json:
            print_json({**session.device_fields, "tasks": documents})


@contextmanager
def _showing_rows(session: Session, task: str) -> Iterator[None]:
    """Show how many rows are done while the block lasts, on a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with progress(*columns, TimeRemainingColumn()) as bar:
        line = bar.add_task(visible(Path(task).stem), total=None)

        def update(count: int, total: int) -> None:
            bar.update(line, completed=count, total=total)

        session.options = replace(session.options, on_rows=update)
        yield


def _show(evaluation: Evaluation, device: str) -> None:
    task = evaluation.task
    answers().print(f"{task.name}: {pluralize(len(task.rows), task.kind)} on {device}")
    for key in evaluation.values:
        if not key.endswith("_error"):
            answers().print(f"  {METRICS[key].label}: {with_error(key, evaluation.values)}")
    if task.left_out:
        print_remark(
            f"{pluralize(task.left_out, 'prompt')} left out: which language an answer is in is "
            "not checked"
        )
