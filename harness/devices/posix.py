"""Ways to Linux machines, here or over SSH: files, properties and failures."""

import shlex
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import BinaryIO

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.base import DeviceProperties, FailReply, Progress, PushItem, StreamClosed
from harness.devices.device import Device, Transport
from harness.devices.files import Files, Transfer
from harness.devices.properties import DF, SCRIPT, linux_properties, parse, parse_df
from harness.errors import (
    DeviceLostError,
    DeviceTimeoutError,
    DeviceTransferError,
    HarnessError,
    HostUnreachableError,
)

_DF_TIMEOUT_S = 10.0

# A folder that is ours alone, lasts, is on a disk rather than in memory, and from which programs
# may be run: /tmp is often in memory or mounted noexec, so it comes last.
_FIND_ROOT = """\
umask 077
try() {
  case $1 in /*) ;; *) return 1 ;; esac
  mkdir -p "$1" && [ -O "$1" ] && [ ! -L "$1" ] || return 1
  probe=$1/.probe.$$
  printf '#!/bin/sh\\nexit 0\\n' >"$probe" && chmod 700 "$probe" && "$probe"
  works=$?
  rm -f "$probe"
  [ "$works" = 0 ] || return 1
  printf %s "$1"
  exit 0
}
if [ -n "$TMPDIR" ]; then try "$TMPDIR/qnnfarm"; fi
if [ -n "$HOME" ]; then try "${XDG_CACHE_HOME:-$HOME/.cache}/qnnfarm-device"; fi
try "/var/tmp/qnnfarm-$(id -u)"
try "/tmp/qnnfarm-$(id -u)"
exit 1
"""


class PosixTransport(Transport):
    """Way to a Linux machine."""

    def __init__(self, serial: str, type: str) -> None:  # noqa: A002 - as `Transport` calls it
        self.serial = serial
        self.type = type

    @abstractmethod
    def _files(self, deadline: Deadline) -> AbstractContextManager[Files]:
        """Return the machine's file system."""

    def send(
        self,
        action: str,
        items: Sequence[PushItem],
        *,
        mtime: int,
        check: bool,  # noqa: ARG002 - it is checked in any case
        timeout_s: float,
        on_progress: Progress | None,
    ) -> int:
        """Send files, each under another name until it is whole; see `Transport.send`."""
        with self._transfer(action, timeout_s) as transfer:
            return sum(transfer.put(item, mtime, on_progress) for item in items)

    def receive(
        self,
        action: str,
        remotes: Sequence[str],
        sinks: Iterable[AbstractContextManager[BinaryIO]],
        *,
        timeout_s: float,
        on_progress: Progress | None,
    ) -> int:
        """Fetch files; see `Transport.receive`."""
        total = 0
        with self._transfer(action, timeout_s) as transfer:
            for remote, opening in zip(remotes, sinks, strict=True):
                with opening as sink:
                    total += transfer.get(remote, sink, on_progress)
        return total

    def find_root(self, device: Device, timeout_s: float) -> str:
        """Return the first of these that is ours and where programs may be run.

        `$TMPDIR/qnnfarm`, `~/.cache/qnnfarm-device`, `/var/tmp/qnnfarm-UID`, `/tmp/qnnfarm-UID`.
        """
        result = device.shell(_FIND_ROOT, timeout_s=timeout_s, check=False)
        if result.exit_status or not result.stdout.isprintable():
            reason = "no folder there is ours and lets programs run: set TMPDIR to one"
            raise DeviceTransferError(self.serial, "work root", reason)
        return result.stdout

    def properties(self, device: Device, timeout_s: float) -> DeviceProperties:
        """Read `/proc`, `/sys` and `os-release`; see `Transport.properties`."""
        deadline = Deadline.for_device(self.serial, "properties", timeout_s)
        facts = parse(device.shell(SCRIPT, timeout_s=timeout_s).stdout)
        free = device.free_bytes(timeout_s=deadline.remaining())
        return linux_properties(self.serial, facts, free)

    def is_up(self, device: Device, deadline: Deadline) -> bool:  # noqa: ARG002
        """Return True: once it lets us in, it has come up."""
        return True

    @contextmanager
    def typed(
        self, action: str, timeout_s: float, log: Callable[[], str] | None = None
    ) -> Iterator[None]:
        """Raise bare failures as errors of the harness; see `Transport.typed`."""
        try:
            yield
        except DeadlineExceeded:
            raise DeviceTimeoutError(self.serial, action, timeout_s, log() if log else "") from None
        except (StreamClosed, FailReply) as error:
            raise DeviceLostError(self.serial, action, str(error)) from None
        except HostUnreachableError as error:
            raise DeviceLostError(self.serial, action, error.reason) from None

    @contextmanager
    def _transfer(self, action: str, timeout_s: float) -> Iterator[Transfer]:
        deadline = Deadline(timeout_s)
        with self.typed(action, timeout_s), self._files(deadline) as files:
            yield Transfer(self.serial, files, self._free_in)

    def _free_in(self, folder: str) -> int | None:
        """Return the free space for an error's text; that it cannot be told is no error."""
        command = f"{DF} {shlex.quote(folder or '.')}"
        try:
            result = Device(self).shell(command, timeout_s=_DF_TIMEOUT_S, check=False)
        except (HarnessError, ValueError):
            return None
        return parse_df(result.stdout)
