"""`qnnfarm bench`: repetitions of one workload on a device, into the results store."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from harness.cli.arguments import ContainerDir, DeviceSerial, Json
from harness.cli.console import answers, print_json, remarks

if TYPE_CHECKING:
    from harness.runtimes.base import GenerationResult
    from harness.store.records import Run


def bench(
    container_dir: ContainerDir,
    db: Annotated[str, typer.Option(help="Results database: a SQLite file, or a database URL.")],
    device: DeviceSerial = None,
    prompt_tokens: Annotated[
        int, typer.Option("-p", "--prompt-tokens", help="Tokens to prefill, bos included.")
    ] = 64,
    new_tokens: Annotated[int, typer.Option("-n", "--new-tokens", help="Tokens to generate.")] = 16,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", help="Measured repetitions.")
    ] = 3,
    warmup: Annotated[
        int, typer.Option("-w", "--warmup", help="Repetitions before, left out of means.")
    ] = 1,
    json: Json = False,
) -> None:
    """Measure prefill, decode, time to first token, init and memory; store every repetition."""
    from harness.cli.session import open_session
    from harness.plans.bench import BenchPlan, run_bench
    from harness.plans.passage import cut_prompt
    from harness.store.store import ResultsStore

    plan = BenchPlan(prompt_tokens, new_tokens, repetitions, warmup)
    plan.check()
    with open_session(container_dir, device) as session:
        session.runtime.check_room(prompt_tokens, new_tokens)
        prompt = cut_prompt(session.container.files["tokenizer.json"], prompt_tokens - 1)
        with ResultsStore.open(db) as store:
            run = run_bench(session.runtime, plan, prompt, session.records(), store, _progress)
    if json:
        print_json(run.model_dump(mode="json"))
        return
    _show(run, db)


def _progress(number: int, total: int, result: "GenerationResult") -> None:
    rate = result.metrics.get("prefill_tokens_per_s", 0.0)
    remarks().print(
        f"repetition {number + 1}/{total}: prefill {rate:.2f} tokens/s", highlight=False
    )


def _show(run: "Run", db: str) -> None:
    from statistics import mean, stdev

    from harness.store.metrics import METRICS

    table = Table("metric", "mean ± sd", "n", box=None, header_style="bold")
    for key, metric in METRICS.items():
        values = run.values(key)
        if values:
            spread = f" ± {metric.format(stdev(values))}" if len(values) > 1 else ""
            table.add_row(
                metric.label,
                f"{metric.format(mean(values))}{spread} {metric.shown_unit}",
                str(len(values)),
            )
    console = answers()
    console.print(f"{run.container.model} on {run.device.soc} ({run.device.serial})", markup=False)
    console.print(table)
    if run.device.emulator:
        console.print("measured on the HTP emulator: its speed says nothing about hardware speed")
    console.print(f"run {run.id} in {db}", markup=False)
