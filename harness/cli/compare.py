"""`qnnfarm compare`: measures two containers in turns on one phone, and gives a verdict."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import (
    DEFAULT_RUNTIME,
    WAIT_S,
    Database,
    Json,
    LongRuntime,
    PoolFile,
    Push,
    Threshold,
    Wait,
)
from harness.cli.bench_options import (
    Charge,
    Devices,
    Label,
    MaxPerplexity,
    MaxTemp,
    MostWarmups,
    NewTokens,
    NoGate,
    PerplexityText,
    PerplexityWindows,
    PromptTokens,
    QualityOptions,
    Reference,
    ReferenceTokens,
    Repetitions,
    Warmup,
    bench_workload,
    conditioning,
    open_series,
    parse_labels,
)
from harness.cli.measured import caveats
from harness.console import Row, answers, print_json, print_remark, print_rows
from harness.exit_codes import verdict_exit_code
from harness.results.comparison import DEFAULT_METRICS, ComparisonGroup, check_metrics, check_pairs
from harness.results.identity import describe_container
from harness.results.statistics.paired import min_pairs
from harness.runtimes.registry import open_model
from harness.workloads.session import Session

_PAIRS = 6


def compare(
    a: Annotated[Path, typer.Argument(help="Folder of the container to compare with.")],
    b: Annotated[Path, typer.Argument(help="Folder of the container that may be worse.")],
    db: Database = "results.db",
    device: Devices = None,
    pool: PoolFile = None,
    runtime: LongRuntime = DEFAULT_RUNTIME,
    sessions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Pairs of sessions, one of each. By default 6, or what more metrics need; 5 do "
            "for a single metric.",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: PromptTokens = 64,
    new_tokens: NewTokens = 16,
    repetitions: Repetitions = 3,
    warmup: Warmup = None,
    most_warmups: MostWarmups = 3,
    threshold: Threshold = 0.05,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A metric to judge by, or its beginning; may be repeated. By default prefill and "
            "decode."
        ),
    ] = None,
    reference_tokens: ReferenceTokens = None,
    max_perplexity: MaxPerplexity = None,
    perplexity_text: PerplexityText = None,
    perplexity_windows: PerplexityWindows = None,
    reference: Reference = None,
    label: Label = None,
    max_temp: MaxTemp = None,
    charge: Charge = None,
    no_gate: NoGate = False,
    wait: Wait = WAIT_S,
    push: Push = None,
    json: Json = False,
) -> None:
    """Run two containers in turns on the same phone, and say whether B is slower.

    Exits 1 where B is slower, or where a container answers wrongly; 2 where there is no verdict.

    Example: qnnfarm compare CONTAINER_A CONTAINER_B --sessions 6
    """
    quality = QualityOptions(max_perplexity, perplexity_text, perplexity_windows, reference)
    workload = bench_workload(
        prompt_tokens, new_tokens, repetitions, warmup, most_warmups, reference_tokens, quality
    )
    metrics = check_metrics(metric or DEFAULT_METRICS)
    pairs = max(_PAIRS, min_pairs(len(metrics))) if sessions is None else sessions
    check_pairs(pairs, len(metrics))
    labels = parse_labels(label)
    prepare = conditioning(max_temp=max_temp, charge=charge, no_gate=no_gate)
    models = open_model(a, runtime), open_model(b, runtime)
    for model in models:
        workload.check(model)
    with open_series(
        device, pool, db, wait_s=wait, prepare=prepare, on_session=partial(_announce, pairs),
        labels=labels, push=push,
    ) as series:  # fmt: skip
        compared = series.compare(
            workload, *models, sessions=pairs, metrics=metrics, threshold=threshold,
        )  # fmt: skip
    if json:
        print_json(_document(compared))
    else:
        _show(compared, series.store.location)
    raise typer.Exit(verdict_exit_code(compared.verdict))


def _announce(pairs: int, number: int, label: str, session: Session) -> None:
    print_remark(f"pair {number + 1} of {pairs}, {label} on {session.device_label}")


def _show(compared: ComparisonGroup, db: str) -> None:
    console = answers()
    for side, run in (("A", compared.a), ("B", compared.b)):
        name = f"{describe_container(run.container)} ({run.container.sha256[:12]})"
        console.print(f"{side} is {name}")
    rows = []
    for metric, comparison in compared.metrics:
        change, interval = comparison.cells
        known = "" if comparison.low is None else f" ({comparison.confidence:.0%})"
        cells = [
            metric.label,
            change,
            f"{interval}{known}",
            str(comparison.pairs),
            comparison.verdict.value,
        ]
        rows.append(Row(cells))
    print_rows(("metric", "change", "interval", "pairs", "verdict"), rows)
    for metric, comparison in compared.metrics:
        console.print(f"{metric.label}: {comparison.reason}")
    for caveat in caveats(compared.runs):
        console.print(caveat)
    console.print(f"verdict: {compared.verdict} (group {compared.group_id} in {db})")


def _document(compared: ComparisonGroup) -> dict[str, object]:
    return {
        "group_id": compared.group_id,
        "verdict": compared.verdict.value,
        "threshold": compared.threshold,
        "metrics": {metric.key: asdict(comparison) for metric, comparison in compared.metrics},
        "sessions": [
            {
                "run": run.id,
                "session": run.session,
                "label": run.label,
                "device": run.device.serial,
                "check": run.check.outcome,
            }
            for run in compared.runs
        ],
    }
