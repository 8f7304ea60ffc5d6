"""Linux machines, here or over SSH: commands, files and properties."""

import shlex
import stat as stat_bits
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from harness.clock import Deadline, DeadlineExceeded
from harness.devices.adb.connection import FailReply, StreamClosed
from harness.devices.base import DeviceProperties, Progress, PullItem, PushItem
from harness.devices.files import Files, Transfer, receiving, stat_local
from harness.devices.properties import DF, SCRIPT, linux_properties, parse, parse_df
from harness.devices.shell_device import ShellDevice
from harness.errors import (
    DeviceLostError,
    DeviceTimeoutError,
    DeviceTransferError,
    HarnessError,
    HostUnreachableError,
)

_LOG_TAIL = 4000
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


class PosixDevice(ShellDevice):
    """A Linux machine."""

    @abstractmethod
    def _files(self, deadline: Deadline) -> AbstractContextManager[Files]:
        """Return its file system."""

    def _find_root(self, timeout_s: float) -> str:
        """Return the first of these that is ours and where programs may be run.

        `$TMPDIR/qnnfarm`, `~/.cache/qnnfarm-device`, `/var/tmp/qnnfarm-UID`, `/tmp/qnnfarm-UID`.
        """
        found = self.shell(_FIND_ROOT, timeout_s=timeout_s, check=False)
        if found.exit_status or not found.stdout.isprintable():
            reason = "no folder there is ours and lets programs run: set TMPDIR to one"
            raise DeviceTransferError(self.serial, "work root", reason)
        return found.stdout

    def properties(self, *, timeout_s: float = 30.0) -> DeviceProperties:
        """Ask the device for its properties."""
        deadline = Deadline(timeout_s)
        said = parse(self.shell(SCRIPT, timeout_s=timeout_s).stdout)
        with self._typed("properties", timeout_s):
            left = deadline.remaining()
        return linux_properties(self.serial, said, self.free_bytes(timeout_s=left))

    def push(
        self,
        local: Path,
        remote: str,
        *,
        timeout_s: float = 600.0,
        mode: int | None = None,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy a file to the device; see `Device.push`."""
        stat = stat_local(local)
        mode = stat_bits.S_IMODE(stat.st_mode) if mode is None else mode
        with self._transfer(f"push of {local.name}", timeout_s) as transfer:
            return transfer.put(PushItem(local, remote, mode), int(stat.st_mtime), on_progress)

    def push_many(
        self,
        items: Iterable[PushItem],
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy files in one go, with the present as their mtime; see `Device.push_many`."""
        batch = list(items)
        for item in batch:
            stat_local(item.local)
        now = int(time.time())
        with self._transfer(f"push of {len(batch)} files", timeout_s) as transfer:
            return sum(transfer.put(item, now, on_progress) for item in batch)

    def pull(
        self,
        remote: str,
        local: Path,
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy a file from the device; see `Device.pull`."""
        action = f"pull of {remote.rpartition('/')[2]}"
        with receiving(local) as sink, self._transfer(action, timeout_s) as transfer:
            return transfer.get(remote, sink, on_progress)

    def pull_many(
        self,
        items: Iterable[PullItem],
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy files from the device in one go; see `Device.pull_many`."""
        batch = list(items)
        total = 0
        with self._transfer(f"pull of {len(batch)} files", timeout_s) as transfer:
            for item in batch:
                with receiving(item.local, sync=False) as sink:
                    total += transfer.get(item.remote, sink, on_progress)
        return total

    @contextmanager
    def _transfer(self, action: str, timeout_s: float) -> Iterator[Transfer]:
        deadline = Deadline(timeout_s)
        with self._typed(action, timeout_s), self._files(deadline) as files:
            yield Transfer(self.serial, files, self._free_in)

    def _free_in(self, folder: str) -> int | None:
        """Return the free space for an error's text; that it cannot be told is no error."""
        try:
            command = f"{DF} {shlex.quote(folder or '.')}"
            said = self.shell(command, timeout_s=_DF_TIMEOUT_S, check=False)
        except (HarnessError, ValueError):
            return None
        return parse_df(said.stdout)

    @contextmanager
    def _typed(
        self, action: str, timeout_s: float, log: Callable[[], str] | None = None
    ) -> Iterator[None]:
        try:
            yield
        except DeadlineExceeded:
            tail = log()[-_LOG_TAIL:] if log else ""
            raise DeviceTimeoutError(self.serial, action, timeout_s, tail) from None
        except (StreamClosed, FailReply) as error:
            raise DeviceLostError(self.serial, action, str(error)) from None
        except HostUnreachableError as error:
            raise DeviceLostError(self.serial, action, error.reason) from None
