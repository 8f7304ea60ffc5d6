"""Notifications: commands that are told of lost devices, plans and nights."""

import hashlib
import json
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.errors import LedgerError, NotificationError, PoolError, one_line
from harness.pool.config import NoticeKind, NotificationConfig, ReceiverConfig
from harness.pool.ledger import Ledger
from harness.pool.states import Event

_MOST_OUTPUT = 1 << 20


def run_program(words: Sequence[str], timeout_s: float, stdin: bytes = b"") -> str:
    """Run a program without a shell.

    Returns:
        The first MiB of its stdout and stderr.

    Raises:
        PoolError: it cannot be run, ended with a status other than 0, or took too long.
    """
    program = one_line(words[0], 80)
    try:
        process = subprocess.run(
            list(words),
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PoolError(f"{program} took longer than {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PoolError(f"{program} cannot be run: {reason}") from None
    if process.returncode:
        output = one_line(process.stdout[-2000:].decode("utf-8", "replace")) or "(silent)"
        raise PoolError(f"{program} ended with status {process.returncode}: {output}")
    return process.stdout[:_MOST_OUTPUT].decode("utf-8", "replace")


log = logging.getLogger(__name__)

_POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class Notification:
    """One notification, sent as a JSON object with these keys.

    Attributes:
        subject: name of the device in the pool, or of the plan.
        text: one line for people; Slack, Mattermost and others show this key of a posted object.
        at: seconds since 1970.
        host: of the process that sends it.
        details: more keys of the JSON object.
        body: all of it for people, in lines; `text` by default.
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
        own = {key: getattr(self, key) for key in ("event", "subject", "text", "at", "host")}
        return {**own, "body": self.body or self.text, **self.details}


def send(receiver: ReceiverConfig, notification: Notification) -> None:
    """Send a notification to one receiver."""
    body = json.dumps(notification.as_mapping()).encode()
    try:
        run_program(receiver.command, receiver.timeout_s, body)
    except PoolError as error:
        raise NotificationError(receiver.command[0], one_line(str(error))) from None


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
