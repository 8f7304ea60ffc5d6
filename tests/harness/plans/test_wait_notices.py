"""What cells wait for is said once it has lasted, and again when the reason is another."""

from dataclasses import replace

import pytest

from harness.devices.spec import DeviceSpec
from harness.plans.protocols import Observer
from harness.plans.wait_notices import WaitNotices
from harness.pool.requirement import MemberStatus, Requirement
from harness.pool.states import MemberState
from tests.harness.plans.farm import HandClock

PHONE = MemberStatus(
    "phone", DeviceSpec("android", "phone"), frozenset(), MemberState.LEASED, "held", 0.0,
    holder="ann: pytest (pid 7): nightly", token=3,
)  # fmt: skip
ANY, HOT = Requirement(), Requirement(tags=frozenset({"hot"}))


class Told(Observer):
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def on_wait(self, wanted: str, reason: str) -> None:
        self.lines.append((wanted, reason))


def test_each_reason_is_told_once() -> None:
    told = Told()
    notices = WaitNotices(told, own="me (pid 1): qnnfarm run", after_s=0)
    drained = replace(PHONE, state=MemberState.DRAINING, holder="", reason="swollen\x1b[2J")
    away = replace(PHONE, state=MemberState.ABSENT, holder="", reason="it does not answer")
    again = replace(away, state=MemberState.RECOVERING, reason="looked for again", since=9.0)
    mine = replace(PHONE, holder="me (pid 1): qnnfarm run")
    for member in (PHONE, PHONE, drained, drained, away, again, away, mine):
        notices.update({ANY: [member]})
    notices.update({})
    notices.update({})
    wanted, reasons = zip(*told.lines, strict=True)
    assert set(wanted) == {"any device"}
    held, out, gone, claimed, over = reasons
    assert held.startswith("phone is held by ann: pytest (pid 7): nightly since ")
    assert out.startswith("phone is draining (swollen [2J) since ")
    assert gone.startswith("phone is absent (it does not answer) since ")
    assert claimed.startswith("phone is being claimed since ")
    assert over == ""


def test_why_a_device_is_absent_is_told_if_somebody_looked_for_it_at_first() -> None:
    told = Told()
    notices = WaitNotices(told, after_s=0)
    full = replace(PHONE, state=MemberState.ABSENT, holder="", reason="it is full")
    again = replace(full, state=MemberState.RECOVERING, reason="looked for again")
    for member in (again, full, again, full):
        notices.update({ANY: [member]})
    assert ["recovering" in told.lines[0][1], "it is full" in told.lines[1][1]] == [True, True]
    assert len(told.lines) == 2


def test_another_reason_that_is_over_soon_is_not_worth_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, told = HandClock(), Told()
    monkeypatch.setattr("harness.plans.wait_notices.time", clock)
    notices = WaitNotices(told, after_s=2.0)
    ready = replace(PHONE, state=MemberState.READY, holder="")
    gone = replace(ready, state=MemberState.ABSENT)
    looks = [(0, PHONE), (2, PHONE), (3, ready), (4, gone), (5.5, PHONE), (6, ready), (7.5, ready)]
    for clock.time, member in looks:
        notices.update({ANY: [member]})
    assert [reason.partition(" since ")[0] for _, reason in told.lines] == [
        "phone is held by ann: pytest (pid 7): nightly"
    ]
    clock.time = 8
    notices.update({ANY: [ready]})
    assert len(told.lines) == 2
    assert told.lines[-1][1].startswith("phone is ready")
    notices.update({})
    assert told.lines[-1] == ("any device", "")


def test_a_short_wait_prints_no_line() -> None:
    told = Told()
    notices = WaitNotices(told, after_s=3600)
    notices.update({ANY: [PHONE]})
    notices.update({HOT: []})
    assert told.lines == []
