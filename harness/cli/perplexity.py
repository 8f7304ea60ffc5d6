"""`qnnfarm perplexity`: scores a text on a device with Genie's accuracy API."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Literal

import typer

from buildlib.numerics.transformers import ReferenceEngine
from harness.cli.arguments import (
    DEFAULT_RUNTIME,
    WAIT_S,
    ContainerDir,
    DeviceName,
    Json,
    KeepIn,
    LogLevel,
    PoolFile,
    Push,
    ReferenceWith,
    Runtime,
    TraceFile,
    Wait,
    read_text,
)
from harness.cli.bench_options import parse_bound
from harness.cli.dialog_options import LoraAdapter
from harness.cli.measured import with_error
from harness.cli.recorded_session import open_recorded_session
from harness.console import answers, print_json, print_remark
from harness.errors import WrongUseError
from harness.exit_codes import BAD
from harness.results.identity import describe_container
from harness.results.metrics import METRICS
from harness.results.perplexity import (
    PERPLEXITY,
    PERPLEXITY_FLOAT,
    explain_chance,
    find_perplexity_faults,
)
from harness.runtimes.base import Model, ModelRole, PerplexityResult
from harness.runtimes.container_model import ContainerModel
from harness.runtimes.dialog_settings import parse_lora
from harness.runtimes.registry import open_model
from harness.words import pluralize
from harness.workloads.base import Recording
from harness.workloads.perplexity import check_scored, float_perplexity, score_text
from harness.workloads.session import Session
from harness.workloads.steps import DEFAULT_STEP_WINDOWS, compare_steps, cut_steps, float_steps

_Opened = AbstractContextManager[tuple[Session, Recording]]
"""Session on the device that is asked for, and the recording of its run."""
MaxPerplexity = Annotated[
    str | None,
    typer.Option(
        metavar="N|P%",
        help="Fail if the perplexity is above N, or more than P percent away from --reference.",
    ),
]


def perplexity(
    container_dir: ContainerDir,
    text: Annotated[Path, typer.Option(help="The text to score.")],
    device: DeviceName = None,
    pool: PoolFile = None,
    runtime: Runtime = DEFAULT_RUNTIME,
    windows: Annotated[
        int | None,
        typer.Option(
            min=1, help="Score only the first windows of the context length; by default all."
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="CHECKPOINT_DIR",
            help="The checkpoint that the container was built from, in Hugging Face layout: it is "
            "scored in float on this host, over the same positions. Kept with `--db`, it is what "
            "`bench` and `compare` check outputs against.",
        ),
    ] = None,
    reference_with: ReferenceWith = "onnx",
    max_perplexity: MaxPerplexity = None,
    role: Annotated[
        Literal["target", "draft"],
        typer.Option(
            help="The model to score, of a container with two: the one that answers, or the one "
            "that drafts for it (spd). `--reference` is its checkpoint."
        ),
    ] = "target",
    lora: LoraAdapter = None,
    per_step: Annotated[
        bool,
        typer.Option(
            "--per-step",
            help="Compare the logits of single decode steps with those of `--reference` instead: "
            "how far the distributions are apart (KL divergence), and how often both find the same "
            "token most probable. Over 2 windows, unless `--windows` says otherwise.",
        ),
    ] = False,
    max_kl: Annotated[
        float | None,
        typer.Option(
            min=0, help="Fail if the KL divergence of `--per-step` is above N nats.", metavar="N"
        ),
    ] = None,
    db: KeepIn = None,
    wait: Wait = WAIT_S,
    log_level: LogLevel = None,
    trace: TraceFile = None,
    push: Push = None,
    json: Json = False,
) -> None:
    """Score a text on a device: the first CL - AR positions of windows of the context length.

    With `--per-step`, compare single decode steps with the model in float.

    Exits 1 where the perplexity is above `--max-perplexity`; without it, where it is too far from
    that of `--reference`: by more than 3 %, or 10 % with weights or activations of fewer bits than
    W8A16.

    Example: qnnfarm perplexity CONTAINER_DIR --text FILE --reference DIR
    """
    if reference_with == "transformers" and reference is None:
        raise WrongUseError("--reference-with transformers needs --reference CHECKPOINT_DIR")
    content = read_text(text)
    model = open_model(container_dir, runtime)
    check_scored(model, per_step=per_step)
    opened = open_recorded_session(
        model, device, pool, command="perplexity", db=db, wait_s=wait, log_level=log_level,
        trace=trace, push=push,
    )  # fmt: skip
    if per_step or max_kl is not None:
        if (
            not per_step
            or reference is None
            or max_perplexity is not None
            or role == "draft"
            or lora is not None
        ):
            raise WrongUseError(
                "--per-step needs --reference CHECKPOINT_DIR, and goes with --max-kl, not with "
                "--max-perplexity, --role draft or --lora"
            )
        _compare_steps(
            model, opened, content, reference, windows, max_kl, reference_with, json=json
        )
        return
    adapter = None if lora is None else dict([parse_lora(lora)])
    _score(
        model, opened, content, windows, reference, reference_with, max_perplexity, role, adapter,
        json=json,
    )  # fmt: skip


def _score(
    model: Model,
    opened: _Opened,
    content: str,
    windows: int | None,
    reference: Path | None,
    reference_with: ReferenceEngine,
    max_perplexity: str | None,
    role: ModelRole,
    lora: Mapping[str, float] | None,
    *,
    json: bool,
) -> None:
    bound = None if max_perplexity is None else parse_bound(max_perplexity)
    if bound is not None and bound.relative and reference is None:
        raise WrongUseError(
            f"--max-perplexity {bound} is relative to the model in float: give --reference "
            "CHECKPOINT_DIR"
        )
    references = _references(reference, reference_with, model, content, windows, role)
    with opened as (session, recording):
        scored = score_text(
            session,
            content,
            recording,
            windows=windows,
            bound=bound,
            references=references,
            reference_with=reference_with,
            role=role,
            lora=lora,
        )
        precision = session.container_info.precision
    result = scored.output
    if json:
        print_json({**session.device_fields, **_document(result), **references})
    else:
        _show(result, session, references)
    faults: tuple[str, ...] = ()
    if bound is None:
        faults = find_perplexity_faults({PERPLEXITY: result.perplexity, **references}, precision)
    for fault in faults:
        print_remark(fault)
    if faults:
        raise typer.Exit(BAD)


def _compare_steps(
    model: Model,
    opened: _Opened,
    content: str,
    reference: Path,
    most: int | None,
    max_kl: float | None,
    reference_with: ReferenceEngine,
    *,
    json: bool,
) -> None:
    """Compare decode steps with float, which the host computes before a device is leased."""
    steps = cut_steps(model.windows(content, most or DEFAULT_STEP_WINDOWS))
    count = sum(len(window.following) for window in steps)
    print_remark(f"computing {pluralize(count, 'step')} in float on this host")
    expected = float_steps(reference, model.info, steps, reference_with)
    with opened as (session, recording):
        result = compare_steps(
            session,
            content,
            steps,
            expected,
            recording,
            max_kl=max_kl,
            reference_with=reference_with,
        )
    values = result.values
    if json:
        over = {"positions": "decode_steps", "steps": count, "windows": len(steps)}
        print_json({**session.device_fields, **values, **over})
        return
    shown = {key: METRICS[key].show(value) for key, value in values.items()}
    answers().print(
        f"KL divergence from float {shown['kl_divergence']}, the same most probable token in "
        f"{shown['top1_agreement']} of {pluralize(count, 'decode step')} in "
        f"{pluralize(len(steps), 'window')}, {describe_container(session.container_info)} on "
        f"{session.device_label}"
    )
    answers().print(
        f"perplexity of these steps {shown['perplexity']}, in float on this host "
        f"{shown['perplexity_float']}"
    )


def _references(
    checkpoint: Path | None,
    engine: ReferenceEngine,
    model: Model,
    text: str,
    most: int | None,
    role: ModelRole,
) -> Mapping[str, float]:
    """Compute references on the host, by metric, before a device is leased."""
    if checkpoint is None:
        return {}
    windows = model.windows(text, most, role)
    print_remark(f"scoring {pluralize(len(windows), 'window')} in float on this host")
    return {PERPLEXITY_FLOAT: float_perplexity(checkpoint, model.info, windows, engine)}


def _document(result: PerplexityResult) -> dict[str, object]:
    return {
        "perplexity": result.perplexity,
        "perplexity_error": result.error,
        "positions": result.positions,
        "tokens": result.tokens,
        "windows": list(result.windows),
        "retries": result.retries,
    }


def _show(result: PerplexityResult, session: Session, references: Mapping[str, float]) -> None:
    whose = " of the draft model" if result.positions.startswith("draft_") else ""
    values = {PERPLEXITY: result.perplexity}
    if result.error is not None:
        values[f"{PERPLEXITY}_error"] = result.error
    answers().print(
        f"perplexity{whose} {with_error(PERPLEXITY, values)} over "
        f"{pluralize(result.tokens, 'token')} in "
        f"{pluralize(len(result.windows), 'window')}, {describe_container(session.container_info)} "
        f"on {session.device_label}",
    )
    if result.retries:
        print_remark(f"the runtime hung or lost its output: {result.retries + 1} tries")
    for value in references.values():
        away = result.perplexity / value - 1
        answers().print(f"in float on this host {value:.3f}: the device is {away:+.2%} from it")
        if isinstance(session.model, ContainerModel):
            n_vocab = session.container.genie_config.dialog.context.n_vocab
            if remark := explain_chance(value, n_vocab):
                print_remark(remark)
