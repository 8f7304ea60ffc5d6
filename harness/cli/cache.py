"""`qnnfarm cache`: lists, shows, checks, prunes and exports the stage cache."""

from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from buildlib.cache import entries as stored
from buildlib.cache.entries import EntryUsage, PruneResult, disk_usage, find_entry
from buildlib.cache.layout import entry_folders
from buildlib.cache.records import read_files, read_info
from buildlib.paths import default_cache_root
from buildlib.sizes import age_text, default_limit, parse_age, parse_size, size_text
from harness.cli.arguments import Json
from harness.cli.tensors import print_facts
from harness.console import answers, print_json, print_remark, print_rows, progress
from harness.errors import BAD, WrongUseError
from harness.words import pluralize

app = typer.Typer(
    help="The cache of stage outputs: list, show, check and remove its entries.",
    no_args_is_help=True,
)

Root = Annotated[
    Path | None,
    typer.Option("--cache", help="The cache root; by default $QNNFARM_CACHE_DIR, or the user's."),
]
_HIDDEN = 20
"""Last digits of a hash, which a list leaves out."""


@app.command("ls")
def ls(cache: Root = None, json: Json = False) -> None:
    """List the entries, most recently used first.

    Example: qnnfarm cache ls
    """
    root = _root(cache)
    usages = sorted(map(EntryUsage.of, entry_folders(root)), key=lambda usage: -usage.used_at)
    entries = [(usage, *usage.describe()) for usage in usages]
    total = disk_usage(usages)
    if json:
        rows = [
            {
                "name": usage.name,
                "model": usage.folder.parent.name,
                "operation": usage.folder.name.partition("_")[0],
                "subject": subject,
                "size_bytes": usage.size_bytes,
                "used_at": datetime.fromtimestamp(usage.used_at, UTC).isoformat(),
                "problem": problem,
            }
            for usage, subject, problem in entries
        ]
        print_json({"root": str(root), "disk_bytes": total, "entries": rows})
        return
    if not entries:
        answers().print(f"nothing in {root}; builds fill it")
        return
    now = datetime.now(UTC).timestamp()
    lines = [
        [
            usage.folder.parent.name,
            usage.folder.name[:-_HIDDEN],
            size_text(usage.size_bytes),
            f"{age_text(now - usage.used_at)} ago",
            Text(problem, "red") if problem else subject,
        ]
        for usage, subject, problem in entries
    ]
    print_rows(("model", "entry", "size", "last use", "subject"), lines, right={"size"})
    console = answers()
    count = pluralize(len(entries), "entry")
    console.print(f"\n{count}, {size_text(total)} with shared files once, in {root}")


@app.command("show")
def show(
    entry: Annotated[
        str, typer.Argument(help="Name of an entry, or the beginning of its name or hash.")
    ],
    cache: Root = None,
    json: Json = False,
) -> None:
    """Show one entry: its inputs, its options and its files.

    Example: qnnfarm cache show ENTRY
    """
    folder = find_entry(_root(cache), entry)
    info, described = read_info(folder), read_files(folder)
    if json:
        print_json(
            {"folder": str(folder)}
            | info.model_dump(mode="json")
            | described.model_dump(mode="json")
        )
        return
    console = answers()
    facts = {
        "folder": folder,
        "operation": info.operation,
        "subject": described.subject,
        "source": info.source,
        "hash": info.hash,
        "created": info.created_at,
        "code": described.code_sha256[:16],
        **{f"reads {number}": sha256 for number, sha256 in enumerate(described.sources, 1)},
        **described.versions,
    }
    print_facts(console, facts)
    if info.config:
        console.print("\nconfiguration", style="bold")
        for option, value in info.config.items():
            console.print(f"  {option} = {dumps(value)}")
    console.print()
    print_rows(
        ("file", "size", "SHA-256"),
        [
            [name, size_text(file.size_bytes), file.sha256[:16]]
            for name, file in described.files.items()
        ],
    )


@app.command("verify")
def verify(
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove what is damaged; builds make it again.")
    ] = False,
    cache: Root = None,
    json: Json = False,
) -> None:
    """Compare every file with its hash. Exits with 1 if a damaged entry remains.

    Example: qnnfarm cache verify --repair
    """
    root = _root(cache)
    verdicts = []
    with progress() as bar:
        task = bar.add_task("reading", total=len(list(entry_folders(root))))
        for verdict in stored.verify(root, repair=repair):
            verdicts.append(verdict)
            bar.advance(task)
    damaged = [verdict for verdict in verdicts if verdict.problem]
    if json:
        print_json({"entries": len(verdicts), "damaged": [vars(verdict) for verdict in damaged]})
    else:
        for verdict in damaged:
            state = "removed" if verdict.removed else "damaged"
            answers().print(f"{state}: {verdict.name}: {verdict.problem}")
        size = size_text(sum(verdict.size_bytes for verdict in verdicts))
        good = len(verdicts) - len(damaged)
        answers().print(f"{good} of {len(verdicts)} entries are as they were written ({size} read)")
    if any(not verdict.removed for verdict in damaged):
        raise typer.Exit(BAD)


@app.command("prune")
def prune(
    to: Annotated[
        str | None,
        typer.Option(help="Remove the least recently used until the cache is this small: 10GB."),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Remove what was not used for so long: 30d, 12h.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all entries.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    cache: Root = None,
    json: Json = False,
) -> None:
    """Remove entries and leftovers of dead builds, except entries that a running build uses.

    Without options, the cache shrinks to $QNNFARM_CACHE_LIMIT if that is set.

    Example: qnnfarm cache prune --to 10GB
    """
    if everything and (to is not None or older_than is not None):
        raise WrongUseError("--all removes everything: leave out --to and --older-than")
    is_explicit = everything or to is not None or older_than is not None
    pruned = stored.prune(
        _root(cache),
        to_bytes=parse_size(to, "--to")
        if to is not None
        else None
        if is_explicit
        else default_limit(),
        older_than=parse_age(older_than, "--older-than") if older_than is not None else None,
        everything=everything,
        dry_run=dry_run,
    )
    if json:
        print_json(
            {
                "removed": [usage.name for usage in pruned.removed],
                "in_use": [usage.name for usage in pruned.in_use],
                "leftovers": [str(path) for path in pruned.leftovers],
                "freed_bytes": pruned.freed_bytes,
                "left_bytes": pruned.left_bytes,
                "dry_run": dry_run,
            }
        )
        return
    _say(pruned, dry_run=dry_run)


def _say(pruned: PruneResult, *, dry_run: bool) -> None:
    console = answers()
    for usage in pruned.removed:
        console.print(f"{usage.name}  {size_text(usage.size_bytes)}")
    for usage in pruned.in_use:
        print_remark(f"{usage.name} stays: a running build uses it")
    if pruned.leftovers:
        console.print(f"{pluralize(len(pruned.leftovers), 'unfinished entry')} of builds that died")
    verb = "would remove" if dry_run else "removed"
    console.print(
        f"{verb} {pluralize(len(pruned.removed), 'entry')}, {size_text(pruned.freed_bytes)}; "
        f"{size_text(pruned.left_bytes)} {'would stay' if dry_run else 'stay'}"
    )


def _root(cache: Path | None) -> Path:
    if cache is not None and not cache.is_dir():
        raise WrongUseError(f"there is no cache in {cache}")
    return cache or default_cache_root()
