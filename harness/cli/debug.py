"""`qnnfarm debug`: KV caches and tensors of a container's graphs, call by call."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from buildlib.builder.model_place import find_model
from buildlib.container.container import GenAIContainer
from buildlib.graph.shape import GraphShape
from buildlib.replay import optimized_model
from buildlib.speculative.agreement import bound_lookahead, bound_turns
from buildlib.speculative.kv_trace import Commit, GraphCall, find_commits, trace_dialog
from harness.cli.arguments import CacheDir, ContainerDir, DeviceOptions, Json
from harness.cli.completion import complete_containers
from harness.cli.device_lease import open_session
from harness.cli.groups import with_groups
from harness.console import answers, print_json, print_remark, print_rows, print_text
from harness.errors import WrongUseError
from harness.exit_codes import BAD
from harness.runtimes.base import GenerationRequest
from harness.runtimes.graph.runtime import GraphRuntime
from harness.runtimes.graph.tensors import Deviation, FloatReference
from harness.runtimes.registry import open_model

app = typer.Typer(help="Diagnoses of caches and tensors, call by call.", no_args_is_help=True)

Prompt = Annotated[str, typer.Option(help="Prompt of the query.")]


@app.command("kv")
def kv(
    container_dir: Annotated[
        Path, typer.Argument(help="Container for the emulator.", autocompletion=complete_containers)
    ],
    prompt: Prompt = "In the beginning",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 8,
    json: Json = False,
) -> None:
    """Show which row of which graph call Genie keeps in each column of its KV cache.

    The first part with caches is shown. After a call Genie adds columns: they are sound if they are
    rows of that call, from the first on, and each row saw those before it and no other.

    Example: qnnfarm debug kv CONTAINER_DIR --max-tokens 8
    """
    container = GenAIContainer.load(container_dir)
    config = bound_turns(container.genie_config, max_tokens)
    target = container.metadata.target
    if not target.emulator:
        reason = "calls are traced on the emulator alone"
        raise WrongUseError(f"{container_dir} is for {target.name}: {reason}")
    config = bound_lookahead(config, container.path, [prompt], max_tokens)
    text, calls = trace_dialog(container.path, config, prompt)
    commits = list(find_commits(calls, config))
    if json:
        print_json(
            {
                "text": text,
                "calls": [asdict(call) for call in calls],
                "commits": [
                    {"call": one.call.number, "columns": one.columns, "sound": one.is_sound}
                    for one in commits
                ],
            }
        )
    else:
        _show(text, calls, commits)
    if not all(one.is_sound for one in commits):
        raise typer.Exit(BAD)


@app.command("tensor")
@with_groups
def tensor(
    container_dir: ContainerDir,
    reference: Annotated[
        str,
        typer.Option(
            metavar="CHECKPOINT_DIR",
            help="The checkpoint, as `build` takes it, which this host runs.",
        ),
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TENSOR",
            help="Values of the model, such as layer_0_scores or 'layer_0_*'; by default all that "
            "are outputs of graphs.",
            show_default=False,
        ),
    ] = None,
    *,
    prompt: Prompt = "In the beginning",
    step: Annotated[
        int, typer.Option(min=0, help="The call that gives token N of the answer; 0 is prefill.")
    ] = 0,
    bound: Annotated[float, typer.Option(metavar="DB", help="Least SQNR of a tensor.")] = 15.0,
    options: DeviceOptions,
    cache: CacheDir = None,
    json: Json = False,
) -> None:
    """Compare tensors of a step on a device with those of the model in float.

    The runtime graph answers the prompt, and the float model sees the same tokens. The first tensor
    that is below the bound is named, with its layer. Graphs with inner tensors are compiled again
    to have them as outputs; their other outputs are compared with those of the container.
    Exits 1 if a tensor is below the bound.

    Example: qnnfarm debug tensor CONTAINER_DIR --reference CHECKPOINT_DIR
    """
    model = open_model(container_dir, "graph")
    changed = optimized_model(GenAIContainer.load(container_dir), cache)
    shape = GraphShape(max(model.info.ars), model.info.cl)
    place = find_model(reference)
    float_model = FloatReference(place.folder, shape, changed)
    selection = float_model.select(names or ())
    request = GenerationRequest(step + 1, prompt=prompt)
    if selection:
        print_remark("graphs that do not give these tensors yet are compiled again")
    with open_session(model, options, command="debug tensor") as session:
        runtime = session.runtime
        assert isinstance(runtime, GraphRuntime)  # noqa: S101  (the model's)
        result, tensors = runtime.dump(request, step, selection, cache_root=cache)
    deviations = float_model.compare(tensors, selection, bound_db=bound)
    outside = [one for one in deviations if not one.holds]
    if json:
        print_json(
            {
                "text": result.text,
                "first": tensors.first,
                "tokens": len(tensors.tokens) - tensors.first,
                "tensors": [_finite(asdict(one)) for one in deviations],
                "first_outside": outside[0].name if outside else None,
                "changed": tensors.changed,
            }
        )
    else:
        _show_deviations(deviations, bound)
        for name in sorted(set(names or ()) & set(selection) - {one.name for one in deviations}):
            print_remark(f"{name} is no value of its own in the compiled graphs")
        if tensors.changed is not None:
            print_remark(_describe_change(tensors.changed))
    if outside:
        raise typer.Exit(BAD)


def _describe_change(changed: Sequence[str]) -> str:
    if not changed:
        return "the graphs with more outputs give all else bit by bit as the container's"
    return f"the graphs with more outputs give {', '.join(changed)} otherwise than the container's"


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    """Replace infinity, for which JSON has no number: equal tensors have an infinite SQNR."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _show_deviations(deviations: Sequence[Deviation], bound: float) -> None:
    console = answers()
    rows = []
    for one in deviations:
        layer = "" if one.layer is None else str(one.layer)
        cells = (one.name, layer, f"{one.sqnr_db:.1f}", f"{one.relative:.2%}")
        rows.append([Text(cell, "" if one.holds else "red") for cell in cells])
    print_rows(("tensor", "layer", "SQNR dB", "largest difference"), rows)
    worst = next((one for one in deviations if not one.holds), None)
    if worst is None:
        console.print(f"all within {bound:g} dB of the float model")
    else:
        where = "" if worst.layer is None else f", in layer {worst.layer}"
        console.print(f"the first below {bound:g} dB is {worst.name}{where}", style="red")


def _show(text: str, calls: Sequence[GraphCall], commits: Sequence[Commit]) -> None:
    console = answers()
    after = {one.call.number: one for one in commits}
    for call in calls:
        console.print(f"call {call.number}: engine {call.engine}, {call.graph}")
        if call.ids is not None:
            console.print(f"  ids        {' '.join(map(str, call.ids))}")
        places = ("?" if place is None else str(place) for place in call.positions)
        console.print(f"  positions  {' '.join(places)}")
        console.print(f"  cache      {_columns(call.columns)}")
        commit = after.get(call.number)
        if commit is not None:
            style = None if commit.is_sound else "red"
            verdict = "" if commit.is_sound else ": not its accepted rows"
            console.print(f"  added      {_columns(commit.columns)}{verdict}", style=style)
    print_text(text)


def _columns(columns: Mapping[int, tuple[int, int] | None]) -> str:
    """Show columns as `column<-call.row`, with `?` for a column that no call gave."""
    cells = (
        f"{column}<-{'?' if origin is None else f'{origin[0]}.{origin[1]}'}"
        for column, origin in columns.items()
    )
    return " ".join(cells) or "empty"
