"""`qnnfarm perplexity`: scores a text on a device with Genie's accuracy API."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.cli.arguments import (
    DEFAULT_RUNTIME,
    ContainerDir,
    Json,
    KeepIn,
    ReferenceWith,
    RunOptions,
    Runtime,
    absolute,
    with_groups,
)
from harness.cli.dialog_options import LoraAdapter, parse_lora
from harness.cli.recorded_session import open_recorded_session, with_error
from harness.console import answers, print_json, print_remark
from harness.errors import BAD
from harness.results.identity import describe_container
from harness.results.perplexity import (
    PERPLEXITY,
    PERPLEXITY_ERROR,
    PERPLEXITY_FLOAT,
    explain_chance,
    find_perplexity_faults,
)
from harness.runtimes.base import PerplexityResult
from harness.runtimes.container_model import ContainerModel
from harness.runtimes.registry import open_model
from harness.words import pluralize
from harness.workloads.perplexity import Perplexity
from harness.workloads.session import Session

MaxPerplexity = Annotated[
    str | None,
    typer.Option(
        "--max-perplexity",
        metavar="N|P%",
        help="Fail if the perplexity is above N, or more than P percent away from --reference.",
    ),
]


@with_groups
def perplexity(
    container_dir: ContainerDir,
    text: Annotated[Path, typer.Option(help="The text to score.")],
    *,
    runtime: Runtime = DEFAULT_RUNTIME,
    windows: Annotated[
        int | None,
        typer.Option(
            min=1, help="Score only the first windows of the context length; by default all."
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT_DIR",
            help="The checkpoint that the container was built from, as `build` takes it: it is "
            "scored in float on this host, over the same positions. Kept with `--db`, it is what "
            "`bench` and `compare` check outputs against.",
        ),
    ] = None,
    reference_with: ReferenceWith = "onnx",
    max_: MaxPerplexity = None,
    role: Annotated[
        Literal["target", "draft"],
        typer.Option(
            help="The model to score, of a container with two: the one that answers, or the one "
            "that drafts for it (spd). `--reference` is its checkpoint."
        ),
    ] = "target",
    lora: LoraAdapter = None,
    db: KeepIn = None,
    options: RunOptions,
    json: Json = False,
) -> None:
    """Score a text on a device: the first CL - AR positions of windows of the context length.

    Exits 1 where the perplexity is above `--max-perplexity`; without it, where it is too far from
    that of `--reference`: by more than 3 %, or 10 % with weights or activations of fewer bits than
    W8A16.

    Example: qnnfarm perplexity CONTAINER_DIR --text FILE --reference DIR
    """
    workload = Perplexity.of(
        text=absolute(text),
        windows=windows,
        max=max_,
        reference=reference,
        reference_with=None if reference_with == "onnx" else reference_with,
        role=None if role == "target" else role,
        lora=parse_lora(lora),
    )
    model = open_model(container_dir, runtime)
    workload.check(model)
    prepared = workload.prepare(model, on_progress=print_remark)  # before a device is leased
    with open_recorded_session(model, options, command="perplexity", db=db) as (session, recording):
        result = workload.run(session, recording, prepared)
        precision = session.container_info.precision
    output, values = result.output, result.values
    if json:
        print_json({**session.device_fields, **_document(output, values)})
    else:
        _show(output, values, session)
    if workload.max is None:
        faults = find_perplexity_faults(values, precision)
        for fault in faults:
            print_remark(fault)
        if faults:
            raise typer.Exit(BAD)


def _document(output: PerplexityResult, values: Mapping[str, float]) -> dict[str, object]:
    return {
        PERPLEXITY_ERROR: output.error,
        **values,
        "positions": output.positions,
        "tokens": output.tokens,
        "windows": list(output.windows),
        "retries": output.retries,
    }


def _show(output: PerplexityResult, values: Mapping[str, float], session: Session) -> None:
    whose = " of the draft model" if output.positions.startswith("draft_") else ""
    answers().print(
        f"perplexity{whose} {with_error(PERPLEXITY, values)} over "
        f"{pluralize(output.tokens, 'token')} in {pluralize(len(output.windows), 'window')}, "
        f"{describe_container(session.container_info)} on {session.device_label}",
    )
    if output.retries:
        print_remark(f"the runtime hung or lost its output: {output.retries + 1} tries")
    reference = values.get(PERPLEXITY_FLOAT)
    if reference is None:
        return
    away = output.perplexity / reference - 1
    answers().print(f"in float on this host {reference:.3f}: the device is {away:+.2%} from it")
    if isinstance(session.model, ContainerModel):
        n_vocab = session.container.genie_config.dialog.context.n_vocab
        if remark := explain_chance(reference, n_vocab):
            print_remark(remark)
