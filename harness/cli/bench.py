"""`qnnfarm bench`: measures a container in one session or several."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.arguments import WAIT_S, ContainerDir, Json, PoolFile, Wait
from harness.cli.bench_options import (
    Charge,
    Devices,
    MaxPerplexity,
    MaxTemp,
    MaxWarmup,
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
)
from harness.console import EMULATOR, Row, answers, print_json, print_remark, print_rows
from harness.words import pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.results.records import Run
    from harness.workloads.session import Session


def bench(
    container_dir: ContainerDir,
    db: Annotated[str, typer.Option(help="Results database: a SQLite file, or a database URL.")],
    device: Devices = None,
    pool: PoolFile = None,
    prompt_tokens: PromptTokens = 64,
    new_tokens: NewTokens = 16,
    repetitions: Repetitions = 3,
    warmup: Warmup = None,
    max_warmup: MaxWarmup = 3,
    sessions: Annotated[
        int, typer.Option(min=1, help="Sessions, spread over the devices in turn.")
    ] = 1,
    reference_tokens: ReferenceTokens = None,
    max_perplexity: MaxPerplexity = None,
    perplexity_text: PerplexityText = None,
    perplexity_windows: PerplexityWindows = None,
    reference: Reference = None,
    max_temp: MaxTemp = None,
    charge: Charge = None,
    no_gate: NoGate = False,
    wait: Wait = WAIT_S,
    json: Json = False,
) -> None:
    """Measure prefill, decode, time to first token, init and memory; store every repetition.

    Each session begins with a device prepared afresh. The output is checked: a speed with a wrong
    output is a failed run.
    """
    from buildlib.container.container import GenAIContainer
    from harness.cli.bench_options import bench_workload, conditioning, open_series

    quality = QualityOptions(max_perplexity, perplexity_text, perplexity_windows, reference)
    workload = bench_workload(
        prompt_tokens, new_tokens, repetitions, warmup, max_warmup, reference_tokens, quality
    )
    prepare = conditioning(max_temp=max_temp, charge=charge, no_gate=no_gate)
    container = GenAIContainer.load(container_dir)
    workload.check(container)
    with open_series(
        workload, device, pool, container, db, wait_s=wait, prepare=prepare,
        on_session=partial(_announce, sessions) if sessions > 1 else _nothing,
    ) as series:  # fmt: skip
        runs = series.run(container, sessions=sessions)
    if json:
        print_json(_document(runs))
        return
    _show(runs, series.store.location)


def _nothing(_number: int, _label: str, _session: "Session") -> None:
    return


def _announce(sessions: int, number: int, _label: str, session: "Session") -> None:
    print_remark(f"session {number + 1} of {sessions} on {session.device_label}")


def _document(runs: "Sequence[Run]") -> dict[str, object]:
    from dataclasses import asdict

    from harness.results.stability import grade_runs
    from harness.workloads.bench import STEADY_METRICS

    return {
        "group_id": runs[0].group_id,
        "sessions": [run.model_dump(mode="json") for run in runs],
        "stability": {key: asdict(grade_runs(runs, key)) for key in STEADY_METRICS},
    }


def _show(runs: "Sequence[Run]", db: str) -> None:
    from harness.results.identity import describe_container
    from harness.results.metrics import find_metric
    from harness.results.stability import grade_runs
    from harness.workloads.bench import STEADY_METRICS

    console = answers()
    first = runs[0]
    serials = ", ".join(dict.fromkeys(run.device.serial for run in runs))
    where = f"{first.device.soc} ({serials})" if first.device.soc else serials
    console.print(f"{describe_container(first.container)} on {where}")
    _print_means(runs)
    if len(runs) > 1 and not first.device.emulator:
        for key in STEADY_METRICS:
            stability = grade_runs(runs, key)
            reasons = "; ".join(stability.reasons)
            words = f"{find_metric(key).label}: stability {stability.grade}, {reasons}"
            console.print(words)
    for line in dict.fromkeys(_warmup_in_words(run) for run in runs):
        console.print(line)
    for line in dict.fromkeys(_check_in_words(run) for run in runs):
        console.print(line)
    if first.device.emulator:
        console.print(EMULATOR)
    if len(runs) == 1:
        console.print(f"run {first.id} in {db}")
    else:
        console.print(f"{len(runs)} sessions, group {first.group_id} in {db}")


def _print_means(runs: "Sequence[Run]") -> None:
    """Print means of repetitions; for several sessions, means of the sessions' means."""
    from harness.results.metrics import METRICS
    from harness.results.stats import summarise

    heading = "n" if len(runs) == 1 else "n in sessions"
    rows = []
    for key, metric in METRICS.items():
        stats = summarise([run.values(key) for run in runs])
        if stats is None:
            continue
        count = str(stats.n) if len(runs) == 1 else f"{stats.n} in {stats.sessions}"
        shown = f"{stats.show(metric)} {metric.shown_unit}".rstrip()
        rows.append(Row([metric.label, shown, count]))
    print_rows(("metric", "mean ± sd", heading), rows)


def _warmup_in_words(run: "Run") -> str:
    count = run.workload.warmup
    words = pluralize(count, "warm-up")
    if run.warmup_detected is None:
        return f"{words}, as given"
    return f"{words} until it was steady" if run.warmup_detected else f"not steady after {words}"


def _check_in_words(run: "Run") -> str:
    if run.check.outcome == "passed":
        return f"output checked: {run.check.reason}"
    return (
        "output not checked: --reference-tokens or --max-perplexity checks it, or what "
        "`qnnfarm perplexity --reference` keeps in the database"
    )
