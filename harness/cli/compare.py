"""`qnnfarm compare`: two containers on the same phone, in turns, and a verdict.

Exit codes: 0 no regression, 1 failed (a wrong output, a broken container), 2 wrong use, 3 B
regressed, 4 no data (a device or the host failed, or the sessions do not suffice for a verdict).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from harness.cli.arguments import WAIT_S, Json, Wait
from harness.cli.console import EMULATOR, answers, print_json, remarks
from harness.cli.measuring import (
    Charge,
    Devices,
    MaxPerplexity,
    MaxTemp,
    MaxWarmup,
    NewTokens,
    NoGate,
    PoolFile,
    PromptTokens,
    ReferenceTokens,
    Repetitions,
    Warmup,
)

if TYPE_CHECKING:
    from harness.measure.comparison import Comparison, Verdict
    from harness.measure.groups import Compared
    from harness.plans.target import Target

REGRESSED, NO_DATA = 3, 4
_NOTHING = "\N{EN DASH}"


def compare(
    a: Annotated[Path, typer.Argument(help="Folder of the container to compare with.")],
    b: Annotated[Path, typer.Argument(help="Folder of the container that may be worse.")],
    db: Annotated[str, typer.Option(help="Results database: a SQLite file, or a database URL.")],
    device: Devices = None,
    pool: PoolFile = None,
    sessions: Annotated[int, typer.Option(min=1, help="Pairs of sessions, one of each.")] = 6,
    prompt_tokens: PromptTokens = 64,
    new_tokens: NewTokens = 16,
    repetitions: Repetitions = 3,
    warmup: Warmup = None,
    max_warmup: MaxWarmup = 3,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="A loss up to that part of A is none.")
    ] = 0.05,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="A metric to judge by; may be repeated. By default prefill and decode."),
    ] = None,
    reference_tokens: ReferenceTokens = None,
    max_perplexity: MaxPerplexity = None,
    max_temp: MaxTemp = None,
    charge: Charge = None,
    no_gate: NoGate = False,
    wait: Wait = WAIT_S,
    json: Json = False,
) -> None:
    """Run two containers in turns on the same phone, and say whether B is slower.

    Exit codes: 0 no regression, 1 failed, 2 wrong use, 3 regressed, 4 no data.
    """
    from buildlib.container.container import GenAIContainer
    from harness.cli.bench import progress
    from harness.cli.measuring import conditioning, device_source, told_of_interrupts, wanted
    from harness.cli.progress import deploy_progress
    from harness.errors import (
        AdbServerError,
        DeviceError,
        HostError,
        PoolError,
        RunnerError,
        RuntimeOutputError,
        one_line,
    )
    from harness.measure.groups import GATED, check_gated, judge_runs
    from harness.plans.bench import BenchPlan, Spread
    from harness.plans.compare import Side, run_comparison
    from harness.plans.expectations import expecting
    from harness.runtimes.files import target_of
    from harness.store.store import ResultsStore

    plan = BenchPlan(prompt_tokens, new_tokens, repetitions, warmup, max_warmup)
    plan.check()
    gated = check_gated(metric or GATED)
    expected = wanted(reference_tokens, max_perplexity)
    around = conditioning(max_temp=max_temp, charge=charge, no_gate=no_gate)
    sides = [
        Side(container, plan.session_of(container))
        for container in (GenAIContainer.load(a), GenAIContainer.load(b))
    ]
    soc = target_of(sides[0].container).soc.name
    with (
        told_of_interrupts(db),
        device_source(device, pool, soc, wait_s=wait) as source,
        ResultsStore.open(db) as store,
    ):
        spread = Spread(
            devices=source,
            store=store,
            expect=expecting(expected, new_tokens, store),
            around=around,
            on_session=_announce,
            on_repetition=progress,
            shown=deploy_progress,
        )
        try:
            runs = run_comparison(spread, *sides, sessions=sessions)
        except (RunnerError, RuntimeOutputError):
            raise  # the container's doing
        except (DeviceError, AdbServerError, HostError, PoolError) as error:
            remarks().print(f"no data: {one_line(str(error))}", markup=False, soft_wrap=True)
            raise typer.Exit(NO_DATA) from error
    compared = judge_runs(runs, gated=gated, threshold=threshold)
    if json:
        print_json(_document(compared))
    else:
        _show(compared, db)
    raise typer.Exit(_exit_code(compared.verdict))


def _exit_code(verdict: "Verdict") -> int:
    from harness.measure.comparison import Verdict

    return {Verdict.REGRESSED: REGRESSED, Verdict.NOT_ENOUGH_DATA: NO_DATA}.get(verdict, 0)


def _announce(number: int, label: str, target: "Target") -> None:
    told = f"pair {number + 1}, {label} on {target.where_in_words}"
    remarks().print(told, markup=False, soft_wrap=True)


def _show(compared: "Compared", db: str) -> None:
    from harness.measure.comparison import Verdict

    table = Table("metric", "B / A", "interval", "pairs", "verdict", box=None, header_style="bold")
    for metric, found in compared.metrics:
        ratio = _NOTHING if found.ratio is None else f"{found.ratio:.3f}"
        table.add_row(metric.label, ratio, _interval(found), str(found.pairs), found.verdict.value)
    console = answers()
    console.print(table)
    for metric, found in compared.metrics:
        console.print(f"{metric.label}: {found.reason}", markup=False)
    unchecked = sum(run.check.outcome != "passed" for run in compared.runs)
    if unchecked:
        told = f"unchecked: the output of {unchecked} of {len(compared.runs)} sessions"
        console.print(f"{told} was compared with nothing", markup=False)
    if any(run.device.emulator for run in compared.runs):
        console.print(EMULATOR)
    words = {Verdict.NOT_ENOUGH_DATA: "no verdict: not enough data"}
    told = words.get(compared.verdict, f"verdict: {compared.verdict.value}")
    console.print(f"{told} (group {compared.group_id} in {db})", markup=False)


def _interval(found: "Comparison") -> str:
    if found.low is None or found.high is None:
        return _NOTHING
    return f"{found.low:.3f} to {found.high:.3f} ({found.confidence:.0%})"


def _document(compared: "Compared") -> dict[str, object]:
    from dataclasses import asdict

    return {
        "group_id": compared.group_id,
        "verdict": compared.verdict.value,
        "metrics": {metric.key: asdict(found) for metric, found in compared.metrics},
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
