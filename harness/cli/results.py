"""`qnnfarm results`: list and prune a results database."""

from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Annotated

import typer

from buildlib.sizes import parse_age, size_text
from harness.cli.arguments import Database, Json
from harness.cli.results_export import export
from harness.cli.results_import import import_results
from harness.cli.results_show import show
from harness.console import answers, print_json, print_remark, print_rows
from harness.errors import CorruptRunError, WrongUseError
from harness.results import maintenance
from harness.results.alerts import assess_store, review_new
from harness.results.maintenance import (
    KeptCounts,
    PruneCounts,
    PrunePolicy,
    disk_usage,
    list_inventory,
)
from harness.results.metrics import JUDGED_METRICS
from harness.results.store import ResultsStore
from harness.words import pluralize, soc_label

app = typer.Typer(
    help="List, export, import and remove what a results database holds.",
    no_args_is_help=True,
)
app.command("export")(export)
app.command("import")(import_results)
app.command("show")(show)


@app.command("ls")
def ls(db: Database = "results.db", json: Json = False) -> None:
    """List the results by day, container, runtime and device, and the size of the database.

    Example: qnnfarm results ls
    """
    with ResultsStore.open(db, create=False) as store:
        location = store.location
        inventory, usage = list_inventory(store.database), disk_usage(store.database)
    if json:
        print_json(
            {
                "database": location,
                "size_bytes": usage.total_bytes,
                "free_bytes": usage.free_bytes,
                "holdings": [asdict(one) for one in inventory],
            }
        )
        return
    rows = [
        [
            str(one.day),
            f"{one.model} {one.precision or ''}".rstrip(),
            one.container_sha256[:12],
            one.runtime,
            one.device_serial,
            f"{one.sessions:,}",
            f"{one.runs:,}",
            f"{one.runs - one.done:,}" if one.runs > one.done else "",
            size_text(one.telemetry_bytes) if one.telemetry_bytes else "",
            soc_label(one.soc, emulator=one.emulator, runtime=one.runtime),
            f"AR {', '.join(map(str, one.ars))}, CL {one.cl}",
            one.labels,
        ]
        for one in inventory
    ]
    numbers = {"sessions", "runs", "no result", "telemetry"}
    headings = (
        "day (UTC)", "model", "container", "runtime", "device", "sessions", "runs", "no result",
        "telemetry", "SoC", "graphs", "labels",
    )  # fmt: skip
    if rows:
        print_rows(headings, rows, right=numbers)
    runs, telemetry = (
        sum(one.runs for one in inventory),
        sum(one.telemetry_bytes for one in inventory),
    )
    free = f", {size_text(usage.free_bytes)} of it free" if usage.free_bytes else ""
    answers().print(
        f"{pluralize(runs, 'run')}, {size_text(telemetry)} of telemetry; {location} has "
        f"{size_text(usage.total_bytes)}{free}",
    )


@app.command("prune")
def prune(
    older_than: Annotated[str, typer.Option(help="Remove results older than this: 90d, 12h, 8w.")],
    keep_measurements: Annotated[
        bool,
        typer.Option(
            "--keep-measurements",
            help="Remove only the telemetry, which is most of the bytes, and the logs and profiles "
            "that are kept with runs; reports lose nothing but its plots.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")
    ] = False,
    db: Database = "results.db",
    json: Json = False,
) -> None:
    """Remove old runs with their measurements and telemetry, and free the disk space.

    Sessions of one cell and both sides of a comparison are removed together, once the newest of
    them is that old and none is running. Perplexities are kept, as later benchmarks are checked
    against them, and so are the nights that open and acknowledged alerts are judged by.

    Example: qnnfarm results prune --older-than 90d --dry-run
    """
    policy = PrunePolicy(_moment(older_than), only_telemetry=keep_measurements)
    with ResultsStore.open(db, create=False) as store:
        if not keep_measurements:
            with suppress(CorruptRunError):  # which may go as well
                policy = replace(policy, alerts=assess_store(store, JUDGED_METRICS))
        database, location = store.database, store.location
        plan = maintenance.count_prunable(database, policy)
        before = maintenance.disk_usage(database)
        keep = KeptCounts() if keep_measurements else maintenance.count_kept(database, policy)
    if not json:
        _announce(plan, policy, location, keep, dry_run=dry_run)
    removal, after, reason = PruneCounts(), before, ""
    if not dry_run:
        with ResultsStore.open(db) as store:
            if policy.alerts:
                review_new(store)
            # What Ctrl-C leaves goes with the next call.
            removal = sum(maintenance.prune(store.database, policy), PruneCounts())
            maintenance.sweep_artifacts(store.database)
            reason = maintenance.free_disk_space(store.database)
            after = maintenance.disk_usage(store.database)
    if json:
        counts = plan if dry_run else removal
        print_json(
            {
                "database": location,
                "before": policy.before,
                **asdict(counts),
                "kept_perplexities": keep.perplexities,
                "kept_of_alerts": keep.of_alerts,
                "size_before_bytes": before.total_bytes,
                "size_bytes": after.total_bytes,
                "free_bytes": after.free_bytes,
                "not_given_back": reason,
                "dry_run": dry_run,
            }
        )
    elif not dry_run:
        _conclude(removal, policy, before.total_bytes - after.total_bytes, after.total_bytes)
        if reason:
            print_remark(f"no disk space was freed: {reason}")


def _moment(age: str) -> datetime:
    try:
        return datetime.now(UTC) - parse_age(age, "--older-than")
    except OverflowError:
        raise WrongUseError(f"--older-than {age}: nothing can be that old") from None


def _announce(
    planned: PruneCounts,
    policy: PrunePolicy,
    location: str,
    kept: KeptCounts,
    *,
    dry_run: bool,
) -> None:
    verb = "would remove" if dry_run else "removing"
    when = f"{policy.before:%Y-%m-%d %H:%M} UTC"
    print_remark(f"{verb} from {location} what is older than {when}: {_in_words(planned, policy)}")
    stay = {
        "perplexity": (kept.perplexities, "later benchmarks are checked against"),
        "run": (kept.of_alerts, "alerts that nobody has settled are judged by"),
    }
    for noun, (count, why) in stay.items():
        if count:
            verb, what = ("stays", "it") if count == 1 else ("stay", "them")
            print_remark(f"{pluralize(count, noun)} of that age {verb}: {why} {what}")


def _conclude(removed: PruneCounts, policy: PrunePolicy, freed: int, left: int) -> None:
    space = f"{size_text(freed)} freed" if freed > 0 else "nothing freed"
    answers().print(f"removed {_in_words(removed, policy)}; {space}, {size_text(left)} left")


def _in_words(amount: PruneCounts, policy: PrunePolicy) -> str:
    telemetry = (
        f"telemetry of {pluralize(amount.telemetry, 'repetition')}, "
        f"{size_text(amount.telemetry_bytes)}"
    )
    if amount.artifacts:
        telemetry += f" and {pluralize(amount.artifacts, 'file')}"
    if policy.only_telemetry:
        return telemetry
    return (
        f"{pluralize(amount.runs, 'run')} with {pluralize(amount.measurements, 'measurement')} and "
        f"{telemetry}"
    )
