"""`qnnfarm config`: judges Genie configurations, and the files beside them."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from buildlib.container.genie_config import GenieConfig
from buildlib.container.genie_limits import Limit, find_limits
from buildlib.container.manifest import GENIE_CONFIG, HTP_CONFIG
from buildlib.container.text_embedding import TextEmbeddingConfig
from buildlib.entry_points import load_entry
from buildlib.errors import InputFileError, ToolchainMissingError
from buildlib.validation import Fault
from harness.cli.arguments import Json
from harness.console import answers, print_json
from harness.errors import BAD, NO_ANSWER, WrongUseError
from harness.runtimes.genie.runtime import DIALOGS, DialogCheck
from plugins.diagnosis.genie_files import Judgement, judge_files

app = typer.Typer(help="Genie configurations: check them.", no_args_is_help=True)


@app.command("check")
def check(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Configuration files of any kind, or containers, whose configurations are meant.",
        ),
    ],
    json: Json = False,
) -> None:
    """Check configuration files with our models and with libGenie's own parser.

    HTP backend extensions are judged by QNN's library for them instead, which drops a file that it
    cannot read, and lets Genie run without its settings. No file that a configuration names has to
    be there, and nothing of it is run. Dialogs of types spd and lade are refused where the
    installed Genie gets them wrong on a model of ours.

    Example: qnnfarm config check CONTAINER_DIR
    """
    paths = [path for file in files for path in _configurations(file)]
    no_genie = None
    try:
        judgements = judge_files(paths)
    except ToolchainMissingError as error:
        no_genie = error
        judgements = judge_files(paths, ask=False)
    if len(judgements) == 1 and judgements[0].kind is None:
        raise InputFileError(str(paths[0]), judgements[0].ours[0].reason)
    if json:
        print_json([_as_json(each) for each in judgements])
    else:
        for each in judgements:
            _show(each)
    if any(each.kind is None for each in judgements):
        raise typer.Exit(NO_ANSWER)
    if not all(each.accepted and not _refusal(each) for each in judgements):
        raise typer.Exit(BAD)
    if no_genie is not None:
        raise no_genie


def _configurations(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    inside = [path / name for name in (GENIE_CONFIG, HTP_CONFIG) if (path / name).is_file()]
    if not inside:
        raise WrongUseError(f"{path} holds neither {GENIE_CONFIG} nor {HTP_CONFIG}")
    return inside


def _show(judgement: Judgement) -> None:
    console = answers()
    kind = judgement.kind
    console.print(f"{judgement.path}: {kind.name if kind else 'of no kind'}", style="bold")
    _show_verdict("our models", judgement.ours)
    if kind is None:
        return
    if judgement.genie is None:
        why = "was not asked" if kind.genie else "has no parser for this kind"
        console.print(f"  {kind.judge} {why}")
    else:
        _show_verdict(kind.judge, judgement.genie.faults)
    for remark in judgement.remarks:
        console.print(f"  note: {remark}", style="yellow")
    for limit in _limits(judgement):
        console.print(f"  not on the emulator: {limit}", style="yellow")
    reason = _refusal(judgement)
    if reason:
        console.print(f"  refused: /dialog/type: {reason}", style="red")


def _show_verdict(who: str, faults: tuple[Fault, ...]) -> None:
    console = answers()
    if not faults:
        verb = "accept" if who.endswith("s") else "accepts"
        console.print(f"  {who} {verb} it", style="green")
        return
    verb = "refuse" if who.endswith("s") else "refuses"
    console.print(f"  {who} {verb} it", style="red")
    for fault in faults:
        console.print(f"    {fault}")


def _limits(judgement: Judgement) -> list[Limit]:
    config = judgement.config
    if not isinstance(config, GenieConfig | TextEmbeddingConfig):
        return []
    return find_limits(config, emulator=True)


def _refusal(judgement: Judgement) -> str:
    """Say why dialogs of this type are refused with the installed Genie; empty if they are not."""
    config = judgement.config
    check = cast("DialogCheck | None", load_entry(DIALOGS, "speculation"))
    if not isinstance(config, GenieConfig) or check is None:
        return ""
    return check.find_fault(config.dialog.type)


def _as_json(judgement: Judgement) -> dict[str, Any]:
    return {
        "file": str(judgement.path),
        "kind": judgement.kind.name if judgement.kind else None,
        "accepted": judgement.accepted and not _refusal(judgement),
        "ours": _verdict(judgement.ours),
        "genie": None if judgement.genie is None else _verdict(judgement.genie.faults),
        "notes": [_row(remark) for remark in judgement.remarks],
        "not_on_emulator": [
            {"pointer": limit.pointer, "feature": limit.feature, "reason": limit.reason}
            for limit in _limits(judgement)
        ],
        "refused": _refusal(judgement) or None,
    }


def _verdict(faults: tuple[Fault, ...]) -> dict[str, Any]:
    return {"accepts": not faults, "faults": [_row(fault) for fault in faults]}


def _row(fault: Fault) -> dict[str, str]:
    return {"pointer": fault.pointer, "reason": fault.reason}
