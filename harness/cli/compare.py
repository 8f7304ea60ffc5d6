"""`qnnfarm compare`: measures two containers in turns on one phone, and gives a verdict."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import Database, Json, Threshold, with_groups
from harness.cli.bench_options import BenchOptions
from harness.cli.completion import complete_containers, complete_metrics
from harness.cli.recorded_session import caveats
from harness.console import answers, print_json, print_remark, print_rows
from harness.results.comparison import ComparisonGroup, check_metrics, check_pairs
from harness.results.identity import describe_container
from harness.results.metrics import LEADING_METRICS
from harness.results.statistics.paired import min_pairs
from harness.results.verdicts import verdict_exit_code
from harness.runtimes.registry import open_model
from harness.workloads.session import Session

_PAIRS = 6


@with_groups
def compare(
    a: Annotated[
        Path,
        typer.Argument(
            help="Folder of the container to compare with.", autocompletion=complete_containers
        ),
    ],
    b: Annotated[
        Path,
        typer.Argument(
            help="Folder of the container that may be worse.", autocompletion=complete_containers
        ),
    ],
    *,
    db: Database = "results.db",
    options: BenchOptions,
    sessions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Pairs of sessions, one of each. By default 6, or what more metrics need; 5 do "
            "for a single metric.",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option("-p", "--prompt-tokens", help="Tokens to prefill, bos included.")
    ] = 64,
    new_tokens: Annotated[int, typer.Option("-n", "--new-tokens", help="Tokens to generate.")] = 16,
    threshold: Threshold = 0.05,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A metric to judge by, or its beginning; may be repeated. By default prefill and "
            "decode.",
            autocompletion=complete_metrics,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run two containers in turns on the same phone, and say whether B is slower.

    Exits 1 where B is slower, or where a container answers wrongly; 2 where there is no verdict.

    Example: qnnfarm compare CONTAINER_A CONTAINER_B --sessions 6
    """
    workload = options.workload(prompt_tokens, new_tokens)
    metrics = check_metrics(metric or LEADING_METRICS)
    pairs = max(_PAIRS, min_pairs(len(metrics))) if sessions is None else sessions
    check_pairs(pairs, len(metrics))
    models = open_model(a, options.runtime), open_model(b, options.runtime)
    for model in models:
        workload.check(model)
    with options.open_series(db, partial(_announce, pairs)) as series:
        group = series.compare(
            workload, *models, sessions=pairs, metrics=metrics, threshold=threshold,
        )  # fmt: skip
    if json:
        print_json(_document(group))
    else:
        _show(group, series.store.location)
    raise typer.Exit(verdict_exit_code(group.verdict))


def _announce(pairs: int, number: int, label: str, session: Session) -> None:
    print_remark(f"pair {number + 1} of {pairs}, {label} on {session.device_label}")


def _show(group: ComparisonGroup, db: str) -> None:
    console = answers()
    for side, run in (("A", group.a), ("B", group.b)):
        name = f"{describe_container(run.container)} ({run.container.sha256[:12]})"
        console.print(f"{side} is {name}")
    rows = []
    for metric, comparison in group.metrics:
        change, interval = comparison.cells
        confidence = "" if comparison.low is None else f" ({comparison.confidence:.0%})"
        cells = [
            metric.label,
            change,
            f"{interval}{confidence}",
            str(comparison.pairs),
            comparison.verdict.value,
        ]
        rows.append(cells)
    print_rows(("metric", "change", "interval", "pairs", "verdict"), rows)
    for metric, comparison in group.metrics:
        console.print(f"{metric.label}: {comparison.reason}")
    for caveat in caveats(group.runs):
        console.print(caveat)
    console.print(f"verdict: {group.verdict} (group {group.group_id} in {db})")


def _document(group: ComparisonGroup) -> dict[str, object]:
    return {
        "group_id": group.group_id,
        "verdict": group.verdict.value,
        "threshold": group.threshold,
        "metrics": {one.metric: one.model_dump() for one in group.comparisons},
        "sessions": [
            {
                "run": run.id,
                "session": run.session,
                "label": run.label,
                "device": run.device.serial,
                "check": run.check.outcome,
            }
            for run in group.runs
        ],
    }
