"""`qnnfarm history`: a metric night by night, with the changes of its level."""

import math
from datetime import datetime
from typing import Annotated, Any

import typer

from harness.cli.arguments import Database, Json
from harness.cli.completion import complete_metrics
from harness.console import Row, answers, print_json, print_remark, print_rows
from harness.errors import WrongUseError
from harness.moments import parse_moment
from harness.results.history import (
    Drift,
    MeasuredNight,
    Series,
    SeriesFilter,
    plan_series,
    read_series,
)
from harness.results.metrics import find_key
from harness.results.statistics.changes import VISIBLE_IN, Change
from harness.results.statistics.planning import SESSIONS
from harness.results.store import ResultsStore
from harness.results.turnover import find_turnover
from harness.words import emulator_notice, percent, pluralize

_LANE = 32
_COMMIT = 10


def _parse_since(text: str) -> datetime:
    return parse_moment(text, "--since")


Since = Annotated[
    datetime | None,
    typer.Option(
        parser=_parse_since,
        metavar="AGE|DATE",
        help="Only runs since then: 7d, 12h, or a date such as 2026-05-31 (UTC).",
    ),
]


def history(
    metric: Annotated[
        str,
        typer.Argument(
            help="Key of a metric, or its beginning: decode, ttft, perplexity.",
            autocompletion=complete_metrics,
        ),
    ],
    db: Database = "results.db",
    model: Annotated[str | None, typer.Option(help="Only containers of this model.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Only devices with this in SoC, maker, model or serial.")
    ] = None,
    branch: Annotated[str | None, typer.Option(help="Only runs of this git branch.")] = None,
    since: Since = None,
    nights: Annotated[int, typer.Option(min=1, help="Show at most so many, the newest.")] = 30,
    to_see: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=90,
            help="Say how many sessions a night would show a loss of so many percent in 3 nights.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show a metric night by night, with the changes of its level and their commits.

    Each night was judged with only the nights before it known. A night holds the sessions of one
    commit and container, and ends with a pause of twelve hours; the lane marks its mean, and `|`
    the level around it.

    Example: qnnfarm history decode --model MODEL --nights 14
    """
    key = find_key(metric)
    selection = SeriesFilter((key,), model=model, device=device, branch=branch, since=since)
    with ResultsStore.open(db, create=False) as store:
        location, histories = store.location, read_series(store, selection)
        newest = max((head.created_at for head in store.heads()), default=None)
    if not histories:
        narrowed = any(option is not None for option in (model, device, branch, since))
        options = " with these options" if narrowed else ""
        raise WrongUseError(
            f"{location} has no history of {key}{options}; `qnnfarm results ls` lists what it holds"
        )
    if json:
        print_json([_to_json(one) | _plan_to_json(one, to_see) for one in histories])
        return
    for one in histories:
        _print_series(one, nights)
        if to_see is not None:
            answers().print(
                f"to see a loss of {to_see:g}% in {VISIBLE_IN} nights here: {_plan(one, to_see)}"
            )
    for line in find_turnover(histories, newest):
        print_remark(line)
    virtual = [one.newest.workload.runtime for one in histories if one.emulator]
    if virtual:
        print_remark(emulator_notice(virtual))


def _plan(series: Series, percent_lost: float) -> str:
    sessions = plan_series(series, percent_lost / 100)
    most = f"more than {SESSIONS[-1]} sessions a night, or a series of more nights"
    return most if sessions is None else f"{pluralize(sessions, 'session')} a night"


def _plan_to_json(series: Series, percent_lost: float | None) -> dict[str, Any]:
    if percent_lost is None:
        return {}
    sessions = plan_series(series, percent_lost / 100)
    return {"plan": {"loss": percent_lost / 100, "nights": VISIBLE_IN, "sessions": sessions}}


def _print_series(series: Series, newest: int) -> None:
    phones = {serial for night in series.nights for serial in night.devices}
    sessions = sum(len(night.sessions) for night in series.nights)
    out = answers()
    out.print(f"{series.metric.label} of {series.name}")
    out.print(
        f"{pluralize(len(series.nights), 'night')}, {pluralize(sessions, 'session')} on "
        f"{pluralize(len(phones), 'device')}, "
        + (pluralize(len(series.changes), "change") if series.changes else "no change")
    )
    if series.sensitivity:
        out.print(f"{series.sensitivity[0].upper()}{series.sensitivity[1:]}")
    for drift in series.drifts:
        out.print(f"{drift}{'' if drift.is_change else ', within noise'}")
    first = max(len(series.nights) - newest, 0)
    nights = series.nights[first:]
    changes = {change.night: change for change in (*series.refuted, *series.changes)}
    levels = {
        number: level for start, end, level in series.levels() for number in range(start, end + 1)
    }
    values = [night.mean for night in nights] + [
        levels[n] for n in range(first, len(series.nights))
    ]
    low, high = min(values), max(values)
    rows = []
    for number, night in enumerate(nights, first):
        change = changes.get(number)
        notes = [describe_change(series, change)] if change else []
        if number in series.swaps:
            notes.append(f"◆ device {series.swaps[number]}: what the code changed here is unknown")
        rows.append(
            Row(
                [
                    f"{night.at:%Y-%m-%d}",
                    series.metric.format(night.mean),
                    f"{night.mean / levels[number] - 1:+.1%}",
                    (night.commit or "")[:_COMMIT],
                    str(len(night.sessions)),
                    _lane(night.mean, levels[number], low, high),
                ],
                notes,
            )
        )
    unit = series.metric.shown_unit or series.metric.key
    headings = ("night (UTC)", unit, "to level", "commit", "sessions", "low to high")
    print_rows(headings, rows, right={unit, "to level", "sessions"})
    for night in series.apart:
        out.print(
            f"left out, off the branch: {night.at:%Y-%m-%d} {(night.commit or '')[:_COMMIT]} "
            f"{series.metric.show(night.mean)}, {pluralize(len(night.sessions), 'session')}"
        )
    out.print()


def _lane(value: float, level: float, low: float, high: float) -> str:
    cells = [" "] * _LANE
    for mark, where in (("|", level), ("●", value)):
        part = (where - low) / (high - low) if high > low else 0.5
        cells[round(part * (_LANE - 1))] = mark
    return "".join(cells).rstrip()


def describe_change(series: Series, change: Change) -> str:
    """Describe a change: its size, the night that showed it, and its commits."""
    kind = "loss" if change.is_loss else "gain"
    kind += f" of {change.scope}" if change.scope else ""
    text = f"▲ {kind}: {percent(change.ratio - 1)} from here on"
    text += f", found {series.nights[change.found].at:%Y-%m-%d}"
    if change.refuted is not None:
        return f"{text}, refuted {series.nights[change.refuted].at:%Y-%m-%d}: back by itself"
    good, bad = series.commits(change)
    if good and bad and good != bad:
        text += f"; commits {good[:_COMMIT]}..{bad[:_COMMIT]}"
    elif bad:
        text += f"; no other commit than {bad[:_COMMIT]}"
    return "; ".join([text, *series.differences(change)])


def _to_json(series: Series) -> dict[str, Any]:
    return {
        "series": series.id,
        "metric": series.metric.key,
        "unit": series.metric.unit,
        "name": series.name,
        "emulator": series.emulator,
        "nights": [_night_to_json(night) for night in series.nights],
        "swaps": [
            {"at": series.nights[night].at, "devices": words}
            for night, words in series.swaps.items()
        ],
        "apart": [_night_to_json(night) for night in series.apart],
        "smallest_loss": series.smallest_loss,
        "drifts": [_drift_to_json(drift) for drift in series.drifts],
        "changes": [_change_to_json(series, change) for change in series.changes],
        "refuted": [_change_to_json(series, change) for change in series.refuted],
    }


def _drift_to_json(drift: Drift) -> dict[str, Any]:
    return {
        "days": drift.days,
        "ratio": drift.ratio,
        "low": drift.ratio * math.exp(-drift.half),
        "high": drift.ratio * math.exp(drift.half),
        "told": drift.told,
        "is_change": drift.is_change,
    }


def _change_to_json(series: Series, change: Change) -> dict[str, Any]:
    return {
        "began": series.nights[change.night].at,
        "found": series.nights[change.found].at,
        "refuted": None if change.refuted is None else series.nights[change.refuted].at,
        "ratio": change.ratio,
        "is_loss": change.is_loss,
        "devices": change.devices,
        "commits": series.commits(change),
        "differences": series.differences(change),
    }


def _night_to_json(night: MeasuredNight) -> dict[str, Any]:
    return {
        "at": night.at,
        "mean": night.mean,
        "commit": night.commit,
        "sessions": [
            {
                "run": one.head.id,
                "device": one.head.device,
                "value": one.value,
                "branch": one.head.branch,
            }
            for one in night.sessions
        ],
    }
