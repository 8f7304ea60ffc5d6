"""`qnnfarm explain`: causes and fixes of error numbers, in an argument, a log or a stored run."""

import dataclasses
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from buildlib.files import check_file
from harness.cli.arguments import Database, Json
from harness.codes import Code, CodeFinding, find_codes, parse_code
from harness.console import answers, print_json, print_remark
from harness.errors import BAD, HostFileError, MissingStoreError, NotStoredError, WrongUseError
from harness.results.store import ResultsStore

_LONGEST_LINE = 4096
_MOST_BYTES = 16 << 20


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CODE|MESSAGE|RUN|LOG",
            help="A number, decimal or hexadecimal, or its constant's name; qnn:, genie:, fastrpc: "
            "or exit: before it says whose it is. Or lines of a log; or its file; or the id of a "
            "stored run; or `latest`.",
        ),
    ],
    db: Database = "results.db",
    json: Json = False,
) -> None:
    """Explain error numbers of QNN, Genie and FastRPC: cause, evidence to look at, fix, source.

    Of lines, a log or a run: every number and message that is known, in the order in which they
    appear. The first is the nearest to the cause.

    Example: qnnfarm explain 0x80000406
    """
    path = Path(what)
    if path.exists():
        findings = _in_file(path)
    elif codes := parse_code(what):
        findings = [(code, "") for code in codes]
    elif " " in what:
        findings = [(finding.code, "") for finding in find_codes(what.splitlines())]
    else:
        findings = _in_runs(what, db)
    if json:
        print_json(
            [
                {**dataclasses.asdict(code), "label": code.label, "at": place}
                for code, place in findings
            ]
        )
    else:
        for number, (code, place) in enumerate(findings):
            _print(code, place, first=not number)
        if not findings:
            print_remark(f"nothing in {what} is an error number or a message that is known here")
    if not any(code.known for code, _ in findings):
        raise typer.Exit(BAD)


def _print(code: Code, place: str, *, first: bool) -> None:
    console = answers()
    if not first:
        console.print()
    name = f" {code.name}" if code.number is not None and code.name else ""
    console.print(f"{code.label}{name}: {_meaning(code)}", style="bold")
    if place:
        console.print(f"  {place}")
    for number, cause in enumerate(code.causes, 1):
        console.print(f"  {number}. {cause.cause}")
        for label, text in (
            ("look at", cause.look_at),
            ("fix", cause.fix),
            ("source", cause.source),
        ):
            console.print(f"     {label:<7}  {text}")
    if code.known and not code.causes:
        console.print(f"  source  {code.source}")


def _meaning(code: Code) -> str:
    if code.meaning:
        return code.meaning
    if code.known:
        return "documented by its name; no cause is known here"
    return "unknown: it is not documented, and was not met here"


def _in_file(path: Path) -> list[tuple[Code, str]]:
    try:
        check_file(path)
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MOST_BYTES))
            if size > _MOST_BYTES:
                print_remark(f"{path} is read from its last {_MOST_BYTES >> 20} MiB on")
            findings = find_codes(_lines(file))
    except OSError as error:
        raise HostFileError(str(path), error.strerror or str(error)) from error
    return [(finding.code, _place(path.name, finding)) for finding in findings]


def _in_runs(what: str, db: str) -> list[tuple[Code, str]]:
    """Return the codes of the logs that are kept with a run, or all runs of a group."""
    findings_by_label: dict[str, tuple[Code, str]] = {}
    try:
        opened = ResultsStore.open(db, create=False)
    except MissingStoreError:
        raise _unknown(what) from None
    with opened as store:
        try:
            runs = store.find_runs(what)
        except NotStoredError:
            raise _unknown(what) from None
        for run in runs:
            logs: list[tuple[str, Iterable[str]]] = [
                (one.name, _lines(io.BytesIO(store.read_artifact(one))))
                for one in store.artifacts(run.id)
                if one.kind == "log"
            ]
            for name, lines in (*logs, ("error", [run.error or ""])):
                for finding in find_codes(lines):
                    place = _place(f"{run.id[:12]} {name}", finding)
                    findings_by_label.setdefault(finding.code.label, (finding.code, place))
    return list(findings_by_label.values())


def _unknown(what: str) -> WrongUseError:
    return WrongUseError(
        f"{what!r} is no error number or constant that is known here, no file, and no stored run"
    )


def _lines(file: BinaryIO) -> Iterator[str]:
    """Read lines of any file, each up to a length."""
    whole = True
    while piece := file.readline(_LONGEST_LINE):
        if whole:
            yield piece.decode(errors="replace")
        whole = piece.endswith(b"\n")


def _place(name: str, finding: CodeFinding) -> str:
    return f"{name}, line {finding.line}: {finding.text[:200]}"
