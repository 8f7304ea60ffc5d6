"""`qnnfarm debug`: tensors of a container's graphs, call by call."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from buildlib.builder.model_place import find_model
from buildlib.container.container import GenAIContainer
from buildlib.graph.shape import GraphShape
from buildlib.replay import optimized_model
from harness.cli.arguments import CacheDir, ContainerDir, DeviceOptions, Json
from harness.cli.device_lease import open_session
from harness.cli.groups import with_groups
from harness.console import answers, print_json, print_remark, print_rows
from harness.exit_codes import BAD
from harness.runtimes.base import GenerationRequest
from harness.runtimes.graph.runtime import GraphRuntime
from harness.runtimes.graph.tensors import Deviation, FloatReference
from harness.runtimes.registry import open_model

app = typer.Typer(help="Diagnoses of tensors, call by call.", no_args_is_help=True)

Prompt = Annotated[str, typer.Option(help="Prompt of the query.")]


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
