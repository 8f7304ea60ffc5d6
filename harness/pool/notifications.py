"""Notifications: commands, webhooks and mail that tell of lost devices, plans and nights."""

import hashlib
import json
import logging
import os
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.policy import SMTP
from typing import Literal

from harness.errors import LedgerError, NotificationError, PoolError, one_line
from harness.pool.config import NoticeKind, NotificationConfig, ReceiverConfig
from harness.pool.ledger import Ledger
from harness.pool.programs import run_program
from harness.pool.states import Event

log = logging.getLogger(__name__)

_POLL_S = 2.0
_SENDMAIL_FOLDERS = ("/usr/sbin", "/usr/lib")
"""Folders of sendmail(8) that are not on the PATH of users or of cron."""


@dataclass(frozen=True, slots=True)
class Notification:
    """One notification, sent as a JSON object with these keys, or as a mail.

    Attributes:
        subject: name of the device in the pool, or of the plan.
        text: one line for people. Slack, Mattermost and others show this key of a posted object; a
            mail has it as its subject.
        at: seconds since 1970.
        host: of the process that sends it.
        details: more keys of the JSON object.
        body: text of a mail; `text` by default.
    """

    event: NoticeKind | Literal["nightly", "test"]
    subject: str
    text: str
    at: float = field(default_factory=time.time)
    host: str = field(default_factory=socket.gethostname)
    details: Mapping[str, object] = field(default_factory=dict)
    body: str = ""

    def as_mapping(self) -> Mapping[str, object]:
        """Return the JSON object."""
        own = ("event", "subject", "text", "at", "host")
        return {**{key: getattr(self, key) for key in own}, **self.details}


def send(receiver: ReceiverConfig, notification: Notification) -> None:
    """Send a notification to one receiver."""
    body = json.dumps(notification.as_mapping()).encode()
    try:
        if receiver.mail:
            command = [_sendmail(receiver), "-i", "-t"]
            run_program(command, receiver.timeout_s, _mail(receiver, notification))
        elif receiver.webhook is None:
            run_program(receiver.command, receiver.timeout_s, body)
        else:
            headers = {"Content-Type": "application/json", "User-Agent": "qnnfarm"}
            # The schema allows http and https alone.
            request = urllib.request.Request(str(receiver.webhook), body, headers)  # noqa: S310
            urllib.request.urlopen(request, timeout=receiver.timeout_s).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        raise NotificationError(receiver.receiver, f"it answers with status {error.code}") from None
    except (PoolError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise NotificationError(receiver.receiver, one_line(str(reason))) from None


def _sendmail(receiver: ReceiverConfig) -> str:
    folders = os.pathsep.join((os.environ.get("PATH", os.defpath), *_SENDMAIL_FOLDERS))
    program = receiver.sendmail or shutil.which("sendmail", path=folders)
    if program is None:
        reason = "this host has no sendmail: install one, such as Debian's msmtp-mta, or name it"
        raise PoolError(f"{reason} by `sendmail`")
    return program


def _mail(receiver: ReceiverConfig, notification: Notification) -> bytes:
    """Return a mail with the recipients in its header, where `sendmail -t` finds them."""
    mail = EmailMessage()
    mail["To"] = ", ".join(receiver.mail)
    if receiver.mail_from:
        mail["From"] = receiver.mail_from
    mail["Subject"] = one_line(f"[qnnfarm] {notification.text}", 200)
    mail["Auto-Submitted"] = "auto-generated"  # RFC 3834: nobody's holiday answers it
    mail.set_content(notification.body or notification.text)
    return mail.as_bytes(policy=SMTP.clone(linesep="\n"))


class Notifier:
    """Sends the notifications of a pool, in a thread if a receiver is told of devices.

    The ledger remembers the last event for each list of receivers, so that of all processes with
    one pool.yaml one sends a notification. A process that is killed while it sends may lose it.

    Args:
        name_of: gives the name, in the pool, of a device by its key; empty for another pool's.
    """

    def __init__(
        self,
        receivers: Sequence[NotificationConfig],
        ledger: Ledger,
        name_of: Callable[[str], str],
    ) -> None:
        self._receivers = tuple(receivers)
        self._ledger = ledger
        self._name_of = name_of
        identity = repr([receiver.model_dump(mode="json") for receiver in receivers])
        self._subscriber = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if any(receiver.events - {"plan_finished"} for receiver in self._receivers):
            self._ledger.take_losses(self._subscriber)
            self._thread = threading.Thread(target=self._run, name="qnnfarm-notifier", daemon=True)
            self._thread.start()

    def send(self, notification: Notification) -> None:
        """Send to every receiver that is told of such events; failures are logged."""
        for receiver in self._receivers:
            if notification.event in receiver.events:
                try:
                    send(receiver, notification)
                except NotificationError as error:
                    log.warning("%s", error)

    def close(self) -> None:
        """Send the notifications that are due, and stop."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            self._send_losses()
        self._send_losses()

    def _send_losses(self) -> None:
        try:
            losses = self._ledger.take_losses(self._subscriber)
        except LedgerError as error:
            log.warning("%s", error)
            return
        for key, entry in losses:
            if name := self._name_of(key):
                kind: NoticeKind = "quarantined" if entry.what == Event.DISTRUSTED else "absent"
                text = one_line(f"{name} is {kind}: {entry.text}", 1000)
                self.send(Notification(kind, name, text, entry.at))
