"""Notifications, taken by a real command and a real HTTP server."""

import email
import email.policy
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
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


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, object]], list[int]]]:
    """A server's URL, what it was posted, and the statuses of its next answers."""
    posted: list[dict[str, object]] = []
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(statuses.pop() if statuses else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/secret", posted, statuses
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_webhook_gets_the_notification(
    webhook: tuple[str, list[dict[str, object]], list[int]],
) -> None:
    url, posted, statuses = webhook
    receiver = NotificationConfig.model_validate({"webhook": url})
    send(receiver, Notification("absent", "dut", "dut is absent", 12.5, "lab"))
    expected = {"event": "absent", "subject": "dut", "text": "dut is absent"}
    assert posted == [{**expected, "at": 12.5, "host": "lab"}]
    statuses.append(403)
    with pytest.raises(NotificationError) as caught:
        send(receiver, Notification("absent", "dut", "dut is absent"))
    assert str(caught.value) == "no notification to 127.0.0.1: it answers with status 403"


@pytest.mark.parametrize(
    ("receiver", "reason"),
    [
        ({"command": ["/nowhere/x"]}, "No such file or directory"),
        ({"command": ["sh", "-c", "echo no way; exit 3"]}, "ended with status 3: no way"),
        ({"command": ["sleep", "60"], "timeout_s": 0.2}, "took longer than 0.2 s"),
        ({"webhook": "http://127.0.0.1:1/secret"}, "Connection refused"),
    ],
)
def test_a_receiver_that_fails_is_one_line_without_secrets(
    receiver: dict[str, object], reason: str
) -> None:
    with pytest.raises(NotificationError, match=reason) as caught:
        send(NotificationConfig.model_validate(receiver), Notification("test", "t", "t"))
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


MAIL = '#!/bin/sh\necho "$@" > {0}.options && cat > {0}\n'


def test_mail_goes_through_the_users_sendmail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sendmail"
    program.write_text(MAIL.format(tmp_path / "mail"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    receiver = NotificationConfig(mail=("lab@example.com", "root"), mail_from="farm@example.com")
    send(receiver, Notification("absent", "dut", "dut is\nabsent", body="It left.\n\u00e9\n"))
    assert (tmp_path / "mail.options").read_text() == "-i -t\n"
    mail = email.message_from_bytes((tmp_path / "mail").read_bytes(), policy=email.policy.default)
    assert (mail["To"], mail["From"]) == ("lab@example.com, root", "farm@example.com")
    assert mail["Subject"] == "[qnnfarm] dut is absent"
    assert mail.get_content() == "It left.\n\u00e9\n"


def test_a_host_without_sendmail_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(NotificationError, match="no notification to root: this host has no sendm"):
        send(NotificationConfig(mail=("root",)), Notification("test", "t", "t"))


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
        "[{command: [a], webhook: 'http://h/'}]",
        "[{}]",
        "[{webhook: 'file:///etc/passwd'}]",
        "[{command: [a], events: [lost]}]",
        "[{mail: ['a b@example.com']}]",
        "[{mail: [a], command: [b]}]",
        "[{command: [a], sendmail: /bin/b}]",
    ],
)
def test_a_receiver_that_cannot_be_told_is_refused(text: str) -> None:
    with pytest.raises(ConfigFileError, match=r"notifications\[0\]"):
        parse_config(f"notifications: {text}\n")
