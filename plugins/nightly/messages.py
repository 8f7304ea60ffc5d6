"""Messages about a night: their receivers, their words and their JSON object."""

import hashlib
from collections.abc import Callable, Iterator

from harness.console import print_remark, visible
from harness.errors import NotificationError
from harness.plans.plan_file import NightlyEntry
from harness.pool.config import ReceiverConfig
from harness.pool.notifications import Notification, send
from plugins.nightly.archive import REPORT
from plugins.nightly.night import Night

Send = Callable[[ReceiverConfig, Notification], None]


def tell(
    night: Night, settings: NightlyEntry, save: Callable[[Night], None], send: Send = send
) -> Night:
    """Send the message of a night, if it has one, to receivers that have not got it yet.

    A receiver that does not take it is tried again by the next call of `qnnfarm nightly`.

    Args:
        save: keeps the night after each receiver, so that nobody is told twice.
    """
    if settings.when == "news" and not night.has_news:
        return night
    notification = compose(night, settings)
    for receiver in settings.tell:
        key = _key(receiver)
        if key in night.told:
            continue
        told, untold = set(night.told), set(night.untold)
        try:
            send(receiver, notification)
            told, untold = told | {key}, untold - {key}
        except NotificationError as error:
            print_remark(f"{error}; the next `qnnfarm nightly` tries again")
            untold |= {key}
        night = night.model_copy(
            update={"told": tuple(sorted(told)), "untold": tuple(sorted(untold))}
        )
        save(night)
    return night


def tell_late(
    night: Night, settings: NightlyEntry, save: Callable[[Night], None], send: Send = send
) -> None:
    """Send the message of an earlier night to receivers that failed then."""
    late = [receiver for receiver in settings.tell if _key(receiver) in night.untold]
    if late:
        tell(night, settings.model_copy(update={"tell": tuple(late)}), save, send)


def compose(night: Night, settings: NightlyEntry) -> Notification:
    """Write the message of a night; plugins/nightly/nightly.md describes its JSON."""
    report = _report(night, settings)
    return Notification(
        "nightly",
        night.plan,
        visible(f"{night.plan} {night.name}: {night.text}"),
        host=night.host,
        details={
            "night": night.name,
            "verdict": night.verdict,
            "error": night.error or None,
            "commit": night.commit,
            "branch": night.branch,
            "cells": night.cells.model_dump(),
            "containers": [each.model_dump() for each in night.containers],
            "regressions": [each.model_dump(mode="json") for each in night.regressions],
            "failures": [each.model_dump() for each in night.failures],
            "series": night.series.model_dump(),
            "news": list(night.news),
            "report": report or None,
        },
        body=visible("\n".join(_body(night, report))) + "\n",
    )


def _report(night: Night, settings: NightlyEntry) -> str:
    """Return the address of the report; without the address of the folder, its path in that."""
    if not night.report:
        return ""
    path = f"{night.name}/{REPORT}"
    return f"{settings.url.rstrip('/')}/{path}" if settings.url else path


def _body(night: Night, report: str) -> Iterator[str]:
    yield f"{night.plan}, night of {night.name} on {night.host}: {night.verdict}"
    if night.error:
        yield night.error
    for heading, entries in (("Regressions", night.regressions), ("Not measured", night.failures)):
        if entries:
            yield f"\n{heading}:"
        for each in entries:
            yield f"  {'new: ' if each.is_new else ''}{each}"
    yield from (f"\n{each}" for each in night.news)
    yield ""
    labels = [each.label for each in night.containers if each.changed]
    yield f"Changed containers: {', '.join(labels) or 'none'}"
    if night.commit:
        yield f"Commit: {night.commit}{f' ({night.branch})' if night.branch else ''}"
    count, cells = night.cells.done, night.cells
    yield f"Cells: {count} of {count + cells.failed + cells.left} done"
    if night.series.judged or night.series.unjudged:
        yield f"Series: {night.series.judged} with a verdict, {night.series.unjudged} without"
    if report:
        yield f"Report: {report}"


def _key(receiver: ReceiverConfig) -> str:
    """Tell receivers apart without keeping their secrets."""
    return hashlib.sha256(receiver.model_dump_json().encode()).hexdigest()[:16]
