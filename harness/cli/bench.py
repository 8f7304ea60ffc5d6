"""`qnnfarm bench`: measures containers in one session or several."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import Database, Json, with_groups
from harness.cli.bench_options import BenchOptions
from harness.cli.bench_tests import BenchTest, LlamaBenchOptions
from harness.cli.completion import complete_containers
from harness.cli.dialog_options import DialogOptions
from harness.cli.recorded_session import caveats
from harness.console import answers, print_json, print_remark, print_rows, print_text
from harness.errors import HarnessError, WrongUseError
from harness.results.identity import Subject, container_name, describe_container
from harness.results.llama_bench import OutputFormat, format_records, list_tests, to_record
from harness.results.metrics import LEADING_METRICS, METRICS, find_metric, summarise
from harness.results.records import Run
from harness.results.stability import grade_runs
from harness.runtimes.registry import open_model
from harness.words import emulator_notice, pluralize
from harness.workloads.session import Session


@with_groups
def bench(
    container_dirs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of containers; several take turns.",
            metavar="CONTAINER_DIR",
            autocompletion=complete_containers,
        ),
    ],
    *,
    db: Database = "results.db",
    test_lists: LlamaBenchOptions,
    options: BenchOptions,
    dialog: DialogOptions,
    sessions: Annotated[
        int, typer.Option(min=1, help="Sessions of each, spread over the devices in turn.")
    ] = 1,
    output: Annotated[
        OutputFormat | None,
        typer.Option("-o", "--output", help="Print a table as llama-bench does, in this format."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure prefill, decode, time to first token, init and memory; store every repetition.

    Lists of tokens and several containers give every combination. Each session begins with a device
    prepared afresh. The output is checked: a speed with a wrong output is a failed run.

    Example: qnnfarm bench CONTAINER_DIR -p 64,128 -n 16 -r 3
    """
    if json and output is not None:
        raise WrongUseError("--json goes without -o: `-o json` is llama-bench's")
    tests = test_lists.tests()
    workloads = [
        options.workload(
            test.prompt_tokens,
            test.new_tokens,
            depth_tokens=test.depth or None,
            **dialog.fields(),
        )
        for test in tests
    ]
    models = [open_model(folder, options.runtime) for folder in container_dirs]
    for model in models:
        for workload in workloads:
            workload.check(model)
    benchmarks = [(model, workload) for model in models for workload in workloads]
    results = [Result(test) for _ in models for test in tests]
    counting = _Counting(sessions * len(benchmarks))
    with options.open_series(db, counting.announce) as series:
        try:
            for index, run in series.run(benchmarks, sessions=sessions):
                results[index].runs.append(run)
        except HarnessError:
            some = [result for result in results if result.runs]
            if some and not json:  # what was measured is not lost on the reader
                _print(some, series.store.location, output)
            raise
    if json:
        print_json({"benchmarks": [_document(result) for result in results]})
    else:
        _print(results, series.store.location, output)


@dataclass(frozen=True, slots=True)
class Result:
    """A test of one container, with the runs of its sessions."""

    test: BenchTest
    runs: list[Run] = field(default_factory=list)


@dataclass(slots=True)
class _Counting:
    """Announces sessions, all benchmarks' together."""

    total: int
    begun: int = 0

    def announce(self, _number: int, _label: str, session: Session) -> None:
        self.begun += 1
        if self.total == 1:
            return
        name = container_name(session.container_info)
        print_remark(f"session {self.begun} of {self.total}: {name} on {session.device_label}")


def _print(results: Sequence[Result], db: str, output: OutputFormat | None) -> None:
    if output is None:
        for number, result in enumerate(results):
            if number:
                answers().print()
            _show(result.runs, db)
        return
    _print_table(results, output)


def _print_table(results: Sequence[Result], output: OutputFormat) -> None:
    """Print the table of `-o`, and its caveats on stderr."""
    records = [
        to_record(test, result.runs)
        for result in results
        for test in list_tests(result.runs, together=result.test.together)
    ]
    print_text(format_records(records, output))
    runs = [run for result in results for run in result.runs]
    for caveat in caveats(runs):
        print_remark(caveat)


def _document(result: Result) -> dict[str, object]:
    """Return a benchmark with the means of its metrics, and its sessions with every repetition."""
    runs = result.runs
    container = runs[0].container
    means = {key: summarise([run.values(key) for run in runs]) for key in METRICS}
    tests = list_tests(runs, together=result.test.together)
    return {
        "group_id": runs[0].group_id,
        "container": container.model_dump(mode="json"),
        "workload": Subject.of(runs[0]).label,
        "metrics": {key: asdict(stats) for key, stats in means.items() if stats is not None},
        "tests": {test.name: asdict(test.stats) for test in tests if test.stats is not None},
        "stability": {key: asdict(grade_runs(runs, key)) for key in LEADING_METRICS},
        "sessions": [run.model_dump(mode="json") for run in runs],
    }


def _show(runs: Sequence[Run], db: str) -> None:
    console = answers()
    first = runs[0]
    serials = ", ".join(dict.fromkeys(run.device.serial for run in runs))
    where = f"{first.device.soc} ({serials})" if first.device.soc else serials
    subject = Subject.of(first)
    parts = filter(None, (describe_container(first.container), subject.by, subject.label))
    console.print(f"{', '.join(parts)} on {where}")
    _print_means(runs)
    if len(runs) > 1 and not first.device.emulator:
        for key in LEADING_METRICS:
            stability = grade_runs(runs, key)
            reasons = "; ".join(stability.reasons)
            words = f"{find_metric(key).label}: stability {stability.grade}, {reasons}"
            console.print(words)
    for line in dict.fromkeys(_warmup_in_words(run) for run in runs):
        console.print(line)
    for line in dict.fromkeys(_check_in_words(run) for run in runs):
        console.print(line)
    if first.device.emulator:
        console.print(emulator_notice([first.workload.runtime]))
    if len(runs) == 1:
        console.print(f"run {first.id} in {db}")
    else:
        console.print(f"{len(runs)} sessions, group {first.group_id} in {db}")


def _print_means(runs: Sequence[Run]) -> None:
    """Print means of repetitions; for several sessions, means of the sessions' means."""
    heading = "n" if len(runs) == 1 else "n in sessions"
    rows = []
    for key, metric in METRICS.items():
        stats = summarise([run.values(key) for run in runs])
        if stats is None:
            continue
        count = str(stats.n) if len(runs) == 1 else f"{stats.n} in {stats.sessions}"
        value = f"{stats.show(metric)} {metric.shown_unit}".rstrip()
        rows.append([metric.label, value, count])
    print_rows(("metric", "mean ± sd", heading), rows)


def _warmup_in_words(run: Run) -> str:
    count = run.workload.warmup
    words = pluralize(count, "warm-up")
    if run.warmup_detected is None:
        return f"{words}, as given"
    return f"{words} until it was steady" if run.warmup_detected else f"not steady after {words}"


def _check_in_words(run: Run) -> str:
    if run.check.outcome == "passed":
        return f"output checked: {run.check.reason}"
    return (
        "output not checked: --reference-tokens or --max-perplexity checks it, or what "
        "`qnnfarm perplexity --reference` keeps in the database"
    )
