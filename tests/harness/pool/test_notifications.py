"""Notifications, taken by a real command."""

import json
from pathlib import Path

import pytest

from harness.errors import ConfigFileError, NotificationError
from harness.pool.config import NotificationConfig, parse_config
from harness.pool.notifications import Notification, Notifier, send
from harness.pool.states import Event
from tests.harness.pool.conftest import Bench, on_each_database


def to_file(path: Path) -> NotificationConfig:
    return NotificationConfig(command=("sh", "-c", 'cat >>"$1" && echo >>"$1"', "sh", str(path)))


def taken(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_command_gets_the_notification(tmp_path: Path) -> None:
    receiver = to_file(tmp_path / "told")
    send(receiver, Notification("absent", "dut", "dut is absent", 12.5, "lab"))
    send(receiver, Notification("absent", "dut", "dut is absent", body="It left.\n\u00e9\n"))
    first, second = taken(tmp_path / "told")
    expected = {"event": "absent", "subject": "dut", "text": "dut is absent"}
    assert first == {**expected, "at": 12.5, "host": "lab", "body": "dut is absent"}
    assert second["body"] == "It left.\n\u00e9\n"


@pytest.mark.parametrize(
    ("receiver", "reason"),
    [
        ({"command": ["/nowhere/x"]}, "No such file or directory"),
        ({"command": ["sh", "-c", "echo no way; exit 3", "secret"]}, "ended with status 3: no way"),
        ({"command": ["sleep", "60"], "timeout_s": 0.2}, "took longer than 0.2 s"),
    ],
)
def test_a_receiver_that_fails_is_one_line_without_secrets(
    receiver: dict[str, object], reason: str
) -> None:
    with pytest.raises(NotificationError, match=reason) as caught:
        send(NotificationConfig.model_validate(receiver), Notification("test", "t", "t"))
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@on_each_database
def test_each_loss_is_told_once_by_one_of_several_processes(bench: Bench, tmp_path: Path) -> None:
    bench.add("a", "b")
    bench.ledger.apply("a", Event.LOST, "long ago")  # before the first pool
    notifiers = [Notifier([to_file(tmp_path / "told")], bench.ledger, str) for _ in range(2)]
    for reason in ("unplugged", "again"):
        bench.ledger.apply("a", Event.FOUND, "plugged in")
        bench.ledger.apply("a", Event.LOST, reason)
        for _ in range(3):  # it is looked for, and not found
            bench.ledger.apply("a", Event.RECOVER, "looked for")
            bench.ledger.apply("a", Event.GAVE_UP, "no step helped")
    bench.ledger.apply("b", Event.DISTRUSTED, "three failures")
    for notifier in notifiers:
        notifier.close()
    told = [(each["event"], each["subject"], each["text"]) for each in taken(tmp_path / "told")]
    assert told == [
        ("absent", "a", "a is absent: ready -> absent: unplugged"),
        ("absent", "a", "a is absent: ready -> absent: again"),
        ("quarantined", "b", "b is quarantined: ready -> quarantined: three failures"),
    ]


def test_a_receiver_hears_only_what_it_is_told_of(bench: Bench, tmp_path: Path) -> None:
    bench.add("a")
    plans = to_file(tmp_path / "plans").model_copy(update={"events": frozenset({"plan_finished"})})
    notifier = Notifier([plans, to_file(tmp_path / "all")], bench.ledger, str)
    bench.ledger.apply("a", Event.LOST, "unplugged")
    notifier.send(Notification("plan_finished", "nightly", "plan nightly: 1 done"))
    notifier.close()
    assert [each["event"] for each in taken(tmp_path / "plans")] == ["plan_finished"]
    assert {str(each["event"]) for each in taken(tmp_path / "all")} == {"absent", "plan_finished"}


@pytest.mark.parametrize(
    "text",
    [
        "[{}]",
        "[{command: []}]",
        "[{command: [a], events: [lost]}]",
        "[{mail: [a@example.com]}]",
    ],
)
def test_a_receiver_that_cannot_be_told_is_refused(text: str) -> None:
    with pytest.raises(ConfigFileError, match=r"notifications\[0\]"):
        parse_config(f"notifications: {text}\n")
