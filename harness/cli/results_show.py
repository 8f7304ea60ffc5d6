"""`qnnfarm results show`: one stored run, or all runs of a group."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import Database, Json, TraceFile, write_file
from harness.cli.recorded_session import save_trace
from harness.console import (
    answers,
    print_json,
    print_remark,
    print_rows,
    print_text,
)
from harness.paths import safe_file_name
from harness.results.identity import (
    Subject,
    describe_clocks,
    describe_container,
    device_name,
)
from harness.results.metrics import METRICS, summarise
from harness.results.perplexity import describe_scored
from harness.results.records import ArtifactRecord, Run
from harness.results.store import ResultsStore
from harness.words import emulator_notice, pluralize, soc_label

RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Id of a run or a group, as `bench` prints it, or the beginning of one, or `latest`.",
    ),
]


def show(
    run: RunId,
    db: Database = "results.db",
    save: Annotated[
        Path | None,
        typer.Option(help="Write the kept files into this folder, in one folder for each run."),
    ] = None,
    trace: TraceFile = None,
    json: Json = False,
) -> None:
    """Show a run: container, device, every repetition, conditions, output check, kept files.

    Of a group, as the sessions of a benchmark or both sides of a comparison, it shows all runs.

    Example: qnnfarm results show RUN --save FOLDER
    """
    with ResultsStore.open(db, create=False) as store:
        runs = store.find_runs(run)
        artifacts = {one.id: store.artifacts(one.id) for one in runs}
        if save is not None:
            for run_id, files in artifacts.items():
                _save(store, files, save / run_id)
        if trace is not None:
            save_trace(store, runs, trace)
    if json:
        print_json(
            [
                {
                    **one.model_dump(mode="json"),
                    "artifacts": [each.model_dump(mode="json") for each in artifacts[one.id]],
                }
                for one in runs
            ]
        )
        return
    console = answers()
    for number, one in enumerate(runs):
        if number:
            console.print()
        _show(one, artifacts[one.id])
    virtual = [one.workload.runtime for one in runs if one.device.emulator]
    if virtual:
        console.print()
        console.print(emulator_notice(virtual))


def _save(store: ResultsStore, files: Sequence[ArtifactRecord], folder: Path) -> None:
    """Write kept files; their names come from a database, so they stay in the folder."""
    for artifact in files:
        path = folder / safe_file_name(artifact.name)
        write_file(path, store.read_artifact(artifact))
        print_remark(f"wrote {path}")


def _show(run: Run, artifacts: Sequence[ArtifactRecord]) -> None:
    console = answers()
    console.print(f"{run.kind} {run.id}: {run.status}")
    if run.error:
        console.print(f"  error: {run.error}")
    width = max(len(name) for name, _ in _facts(run))
    for name, value in _facts(run):
        if value:
            console.print(f"  {name:<{width}}  {value}")
    for condition in run.conditions:
        words = ", ".join(f"{key} {value}" for key, value in condition.items() if value is not None)
        console.print(f"  {'condition':<{width}}  {words}")
    for artifact in artifacts:
        text = f"{artifact.name}, {artifact.size_bytes:,} bytes, sha256 {artifact.sha256[:12]}"
        console.print(f"  {artifact.kind:<{width}}  {text}")
    _print_values(run)
    if run.generated_text is not None:
        console.print("generated text:")
        print_text(run.generated_text)


def _facts(run: Run) -> list[tuple[str, str]]:
    """Return names and values of a run's facts; a value is empty where it is unknown."""
    container, device, source = run.container, run.device, run.provenance
    soc = soc_label(device.soc, emulator=device.emulator, runtime=run.workload.runtime)
    scored = run.workload.perplexity
    commit = f"{source.git_commit} {source.git_branch or ''}".strip() if source.git_commit else ""
    warmup = {None: "", True: ", steady after them", False: ", not steady after them"}
    repetitions = ""
    if run.kind == "bench":
        repetitions = pluralize(run.workload.repetitions, "repetition")
        repetitions += f", {pluralize(run.workload.warmup, 'warm-up')}"
        repetitions += warmup[run.warmup_detected]
    at_once = run.concurrent_sessions
    return [
        ("container", f"{describe_container(container)} for {container.target}".strip()),
        ("", container.sha256),
        ("device", ", ".join(filter(None, (device.serial, soc, device_name(run))))),
        ("memory", f"{device.ram_bytes / 2**30:.1f} GiB" if device.ram_bytes else ""),
        ("build", device.build_fingerprint or device.os_build or ""),
        ("clocks", "; ".join(f"{name} {words}" for name, words in describe_clocks(device))),
        ("workload", Subject.of(run).label if scored is None else describe_scored(scored)),
        ("", repetitions),
        ("runtime", Subject.of(run).runtime),
        ("runner", f"{run.workload.runner} {(run.workload.runner_sha256 or '')[:12]}".strip()),
        ("began", f"{run.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("ended", f"{run.finished_at:%Y-%m-%d %H:%M:%S} UTC" if run.finished_at else ""),
        ("group", f"{run.group_id}, session {run.session + 1}"),
        ("label", run.label),
        ("labels", ", ".join(f"{key}={value}" for key, value in run.labels.items())),
        ("plan", run.plan or ""),
        ("at once", "" if at_once is None else pluralize(at_once, "session") + " on the host"),
        ("output", " ".join(filter(None, (run.check.outcome, run.check.reason)))),
        ("host", source.host),
        ("qnnfarm", source.qnnfarm_version),
        ("commit", commit),
        ("compiler", _versions(source.toolchain, source.toolchain_versions)),
        ("libraries", _versions("", source.library_versions)),
    ]


def _versions(name: str, versions: Mapping[str, str]) -> str:
    texts = ", ".join(f"{key} {value}" for key, value in sorted(versions.items()))
    return f"{name}: {texts}" if name and texts else name or texts


def _print_values(run: Run) -> None:
    """Print every repetition, warm-ups in brackets, with mean and spread of the measured ones."""
    rows = []
    for key, metric in METRICS.items():
        warmups, values = run.values(key, warmup=True), run.values(key)
        if not warmups and not values:
            continue
        stats = summarise([values])
        mean = "" if stats is None else f"{stats.show(metric)} {metric.shown_unit}".rstrip()
        texts = [f"({metric.format(value)})" for value in warmups]
        texts += [metric.format(value) for value in values]
        rows.append([metric.label, mean, " ".join(texts)])
    if rows:
        print_rows(("metric", "mean ± sd", "repetitions, warm-ups in brackets"), rows)
