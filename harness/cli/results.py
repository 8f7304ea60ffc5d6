"""`qnnfarm results`: what a results database holds, and how what is old is removed from it."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.arguments import Json
from harness.cli.console import answers, print_json, tell
from harness.cli.tables import Row, print_rows
from harness.errors import WrongUseError
from harness.words import counted, soc_in_words

if TYPE_CHECKING:
    from harness.results.prune import Amount, Pruning
    from harness.results.store import ResultsStore

app = typer.Typer(
    help="A results database: what it holds of each day, and removing what is old.",
    no_args_is_help=True,
)

Database = Annotated[
    str, typer.Option("--db", help="Results database: a file, or an SQLAlchemy URL.")
]


@app.command("ls")
def ls(db: Database = "results.db", json: Json = False) -> None:
    """List what there is of each day, container and device, and the size of the database."""
    from buildlib.cache.sizes import size_text
    from harness.results.store import ResultsStore

    with ResultsStore.open(db, create=False) as store:
        found, room, location = store.holdings(), store.room(), store.location
    if json:
        print_json(
            {
                "database": location,
                "size_bytes": room.total_bytes,
                "free_bytes": room.free_bytes,
                "holdings": [asdict(one) for one in found],
            }
        )
        return
    rows = [
        Row(
            [
                str(one.day),
                one.model,
                one.container_sha256[:12],
                one.device_serial,
                f"{one.sessions:,}",
                f"{one.runs:,}",
                f"{one.runs - one.done:,}" if one.runs > one.done else "",
                size_text(one.telemetry_bytes) if one.telemetry_bytes else "",
                soc_in_words(one.soc, emulator=one.emulator),
            ]
        )
        for one in found
    ]
    numbers = {"sessions", "runs", "no result", "telemetry"}
    headings = (
        "day (UTC)", "model", "container", "device", "sessions", "runs", "no result", "telemetry",
        "SoC",
    )  # fmt: skip
    if rows:
        print_rows(headings, rows, right=numbers)
    runs, telemetry = sum(one.runs for one in found), sum(one.telemetry_bytes for one in found)
    free = f", {size_text(room.free_bytes)} of it free" if room.free_bytes else ""
    answers().print(
        f"{counted(runs, 'run')}, {size_text(telemetry)} of telemetry; {location} has "
        f"{size_text(room.total_bytes)}{free}",
        markup=False,
    )


@app.command("prune")
def prune(
    older_than: Annotated[
        str, typer.Option(help="Remove what was measured longer ago: 90d, 12h, 8w.")
    ],
    keep_measurements: Annotated[
        bool,
        typer.Option(
            "--keep-measurements",
            help="Remove just the telemetry, which is most of the bytes; reports stay as they are "
            "but for its plots.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    db: Database = "results.db",
    json: Json = False,
) -> None:
    """Remove old runs with all that belongs to them, and give the room back to the disk.

    Sessions of one cell and both sides of a comparison go together, when the newest of them is
    that old and none is under way. Perplexities stay: later benchmarks are checked against them.
    """
    from harness.results.prune import Amount, Pruning
    from harness.results.store import ResultsStore

    wanted = Pruning(_moment(older_than), only_telemetry=keep_measurements)
    with ResultsStore.open(db, create=False) as store:
        planned, before, location = store.prunable(wanted), store.room(), store.location
        kept = 0 if keep_measurements else store.vouching(wanted.before)
    if not json:
        _announce(planned, wanted, location, kept, dry_run=dry_run)
    removed, after, left = Amount(), before, ""
    if not dry_run:
        with ResultsStore.open(db) as store:
            removed = _prune(store, wanted)
            left = store.give_back()
            after = store.room()
    if json:
        shown = planned if dry_run else removed
        print_json(
            {
                "database": location,
                "before": wanted.before,
                **asdict(shown),
                "kept_perplexities": kept,
                "size_before_bytes": before.total_bytes,
                "size_bytes": after.total_bytes,
                "free_bytes": after.free_bytes,
                "not_given_back": left,
                "dry_run": dry_run,
            }
        )
    elif not dry_run:
        _conclude(removed, wanted, before.total_bytes - after.total_bytes, after.total_bytes)
        if left:
            tell(f"no room was given back to the disk: {left}")


def _moment(age: str) -> datetime:
    from buildlib.cache.sizes import parse_age

    try:
        return datetime.now(UTC) - parse_age(age, "--older-than")
    except OverflowError:
        raise WrongUseError(f"--older-than {age}: nothing can be that old") from None


def _prune(store: "ResultsStore", wanted: "Pruning") -> "Amount":
    """Remove it; what is cut off by Ctrl-C goes on with the next call."""
    from harness.results.prune import Amount

    removed = Amount()
    for some in store.prune(wanted):
        removed += some
    return removed


def _announce(
    planned: "Amount", wanted: "Pruning", location: str, kept: int, *, dry_run: bool
) -> None:
    verb = "would remove" if dry_run else "removing"
    when = f"{wanted.before:%Y-%m-%d %H:%M} UTC"
    tell(f"{verb} from {location} what is older than {when}: {_in_words(planned, wanted)}")
    if kept:
        stay = "stays: later benchmarks are checked against it" if kept == 1 else (
            "stay: later benchmarks are checked against them"
        )  # fmt: skip
        tell(f"{counted(kept, 'perplexity')} of that age {stay}")


def _conclude(removed: "Amount", wanted: "Pruning", freed: int, left: int) -> None:
    from buildlib.cache.sizes import size_text

    given = f"{size_text(freed)} freed" if freed > 0 else "nothing freed"
    answers().print(
        f"removed {_in_words(removed, wanted)}; {given}, {size_text(left)} left", markup=False
    )


def _in_words(amount: "Amount", wanted: "Pruning") -> str:
    from buildlib.cache.sizes import size_text

    telemetry = (
        f"telemetry of {counted(amount.telemetry, 'repetition')}, "
        f"{size_text(amount.telemetry_bytes)}"
    )
    if wanted.only_telemetry:
        return telemetry
    return (
        f"{counted(amount.runs, 'run')} with {counted(amount.measurements, 'measurement')} and "
        f"{telemetry}"
    )
