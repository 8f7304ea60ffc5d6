"""History of devices: the newest events of each kind, and the failures that count against them.

Leases, which are many, push out neither failures nor repairs; which failures count is judged by
those of all devices.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, func, select

from harness.pool.failure_policy import FailureRecord, FailureReport, Work
from harness.pool.records import devices, evidence, history, leases, shown

_EVENTS = 500
"""Of a kind, by device."""
_BATCH = 50
"""Old events go at each event of the ledger with such a number, not at every one."""
_LONGEST_TEXT = 1000


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """An event of a device.

    Attributes:
        at: seconds since 1970.
        what: its kind.
    """

    at: float
    what: str
    text: str


def add_event(
    db: Connection,
    key: str,
    at: float,
    what: str,
    text: str,
    token: int | None = None,
    grant: str = "",
) -> None:
    """Add an event of a device; the oldest of a kind go once there are many.

    Args:
        token, grant: of the lease that was lost, if one was.
    """
    text = text[:_LONGEST_TEXT].replace("\0", " ")
    event = history.insert().values(key=key, at=at, what=what, text=text, token=token, nonce=grant)
    number = db.execute(event.returning(history.c.id)).scalar_one()
    if number % _BATCH == 0:
        place = func.row_number().over(partition_by=history.c.what, order_by=history.c.id.desc())
        events = select(history.c.id, place.label("place")).where(history.c.key == key).subquery()
        old = select(events.c.id).where(events.c.place > _EVENTS)
        db.execute(delete(history).where(history.c.id.in_(old)))


def read_history(db: Connection, key: str, since: float) -> list[HistoryEntry]:
    """Return the events of a device, oldest first.

    Args:
        since: seconds since 1970; events before are left out.
    """
    events = select(history).where(history.c.key == key, history.c.at >= since)
    entries = []
    for row in db.execute(events.order_by(history.c.id)):
        text = row.text if row.token is None else f"token {row.token}: {row.text}"
        entries.append(HistoryEntry(row.at, shown(row.what), shown(text)))
    return entries


_MEMORY = 100
"""Number of a device's last leases whose failures are kept."""
_COUNTS: ColumnElement[bool] = and_(
    evidence.c.settled == 0, evidence.c.counts == 1, evidence.c.weight > 0
)
"""Failures that count against their device, unless they turn out to be those of work."""


def judge(db: Connection, key: str, report: FailureReport, *, at: float, began: float) -> str:
    """Store a failure of a device; return why it counts against its work, or nothing.

    Args:
        at, began: seconds since 1970.
    """
    blame = _blame_for(db, key, report, began)
    excuse = blame or report.answered
    was_before = not excuse and _was_counted(db, key, report)
    work = report.work
    lease = select(devices.c.leases).where(devices.c.key == key).scalar_subquery()
    failure = evidence.insert().values(
        key=key,
        at=at,
        began=began,
        lease=lease,
        kind=report.kind,
        weight=report.weight,
        text=report.text,
        work=work.id if work else "",
        subject=work.subject if work and report.weight else "",
        is_device=int(report.is_device),
        counts=int(not excuse),
    )
    db.execute(failure)
    if report.weight:
        if was_before:
            excuse = "it failed there before, and counts once a device"
        what = "not counted" if excuse else "counted"
        why = excuse or f"it weighs {report.weight:g}"
        add_event(db, key, at, f"{what}: {report.kind}", f"{report.description}; {why}")
    return blame


def _blame_for(db: Connection, key: str, report: FailureReport, began: float) -> str:
    # Work that began before it failed elsewhere may have failed for a common reason, such as a hub.
    if report.work is None or not report.weight:
        return ""
    before = evidence.c.at <= began, evidence.c.weight > 0, evidence.c.key != key
    alike = evidence.c.subject == report.work.subject, evidence.c.kind == report.kind
    query = select(devices.c.name).join(evidence, evidence.c.key == devices.c.key)
    names = db.scalars(query.where(*alike, *before).order_by(evidence.c.id)).all()
    return f"it fails alike on {', '.join(map(shown, dict.fromkeys(names)))}" if names else ""


def _was_counted(db: Connection, key: str, report: FailureReport) -> bool:
    """Return whether the same failure of this work was counted against the device before."""
    if report.work is None or report.is_device:
        return False
    alike = evidence.c.subject == report.work.subject, evidence.c.kind == report.kind
    query = select(evidence.c.id).where(evidence.c.key == key, *alike, _COUNTS)
    return db.scalar(query.limit(1)) is not None


def failures_of(db: Connection, keys: Collection[str]) -> dict[str, tuple[FailureRecord, ...]]:
    """Return the failures that count against devices, by key, the newest last.

    Of each lease, and of each work, the heaviest counts. Work that began on another device after it
    had failed here, and failed alike there, is at fault itself.
    """
    later = evidence.alias()
    alike = (
        later.c.subject == evidence.c.subject,
        later.c.kind == evidence.c.kind,
        later.c.key != evidence.c.key,
        later.c.began >= evidence.c.at,
        later.c.weight > 0,
    )
    fails_elsewhere = and_(evidence.c.subject != "", exists().where(*alike))
    query = select(evidence).where(evidence.c.key.in_(tuple(keys)), _COUNTS, ~fails_elsewhere)
    failures: dict[str, list[FailureRecord]] = {}
    for row in db.execute(query.order_by(evidence.c.id)):
        subject = "" if row.is_device else row.subject
        record = FailureRecord(row.lease, row.weight, shown(row.kind), shown(row.text), subject)
        failures.setdefault(row.key, []).append(record)
    return {
        key: _heaviest(_heaviest(records, lambda f: f.lease), lambda f: f.subject or f.lease)
        for key, records in failures.items()
    }


def _heaviest(
    failures: Iterable[FailureRecord], part: Callable[[FailureRecord], object]
) -> tuple[FailureRecord, ...]:
    heaviest: dict[object, FailureRecord] = {}
    for failure in failures:
        other = heaviest.get(part(failure))
        if other is None or failure.weight > other.weight:
            heaviest[part(failure)] = failure
    return tuple(heaviest.values())


def has_failed(db: Connection, work: Work) -> bool:
    """Return whether work failed on any device, as far as is known."""
    return db.scalar(select(evidence.c.id).where(evidence.c.work == work.id).limit(1)) is not None


def confirm(db: Connection, work: Work, grant: str) -> None:
    """Let failures of work stand against their devices, as it ended well under another lease."""
    here = select(leases.c.key).where(leases.c.nonce == grant)
    elsewhere = evidence.c.work == work.id, evidence.c.key.not_in(here)
    db.execute(evidence.update().where(*elsewhere).values(work="", subject=""))


def record_use(db: Connection, key: str) -> None:
    """Record the end of a lease under which a device was used.

    A good one ends the row of its failures; many of them let former quarantines be forgotten.
    """
    device = db.execute(select(devices).where(devices.c.key == key)).one()
    of_lease = evidence.c.key == key, evidence.c.lease == device.leases, evidence.c.weight > 0
    good = device.good + 1
    if db.scalar(select(evidence.c.id).where(*of_lease).limit(1)) is not None:
        good = 0
    else:
        settle(db, key)
    returns = 0 if good >= _MEMORY else device.returns
    db.execute(devices.update().where(devices.c.key == key).values(good=good, returns=returns))
    old = evidence.c.key == key, evidence.c.lease < device.leases - _MEMORY
    db.execute(evidence.delete().where(*old))


def settle(db: Connection, key: str) -> None:
    """Let no failure before now count any more against a device."""
    unsettled = evidence.c.key == key, evidence.c.settled == 0
    db.execute(evidence.update().where(*unsettled).values(settled=1))
