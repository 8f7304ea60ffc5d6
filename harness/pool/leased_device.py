"""Device under a lease: every call first checks that the lease still holds."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from harness.devices.base import CommandResult, Device, DeviceProperties, Progress, PushItem
from harness.devices.commands import command_line
from harness.errors import DeviceCommandError, LeaseLostError
from harness.pool.action_names import CHECKING, action_named, describe_command
from harness.pool.fence import ClaimedDevice, Fence

_LOG_TAIL = 4000
_CHECK_S = 30.0


class LeaseCheck(Protocol):
    """The lease of a leased device."""

    def check(self) -> None:
        """Raise `LeaseLostError` if the lease is lost."""
        ...

    def lose(self, reason: str) -> LeaseLostError:
        """Give the lease up as lost, and return the error to raise."""
        ...


class LeasedDevice:
    """A device under a lease; implements `harness.devices.base.Device`.

    Every method raises `LeaseLostError` before it touches the device if the lease is lost. Commands
    check the fence on the device itself, and transfers do so before and after: that stops a holder
    that was suspended in the middle.

    Attributes:
        member: its name in the pool.
        used: whether it was used under this lease.
        dirty: whether a command was cut off on it, so that processes may remain.
    """

    def __init__(self, claimed: ClaimedDevice, lease: LeaseCheck) -> None:
        self.member = claimed.member
        self.key = claimed.key
        self.used = False
        self.dirty = False
        self._device = claimed.device
        self._fence = claimed.fence
        self._lease = lease

    def __repr__(self) -> str:
        return f"LeasedDevice({self.member!r}, token {self._fence.token})"

    @property
    def fence(self) -> Fence:
        """Its fence with the token of the lease."""
        return self._fence

    @property
    def unleased(self) -> Device:
        """The device without the checks, for the pool's own work on it."""
        return self._device

    @property
    def serial(self) -> str:
        """Its address."""
        return self._device.serial

    @property
    def type(self) -> str:
        """Its device type."""
        return self._device.type

    @property
    def work_root(self) -> str:
        """Our folder on it."""
        return self._fence.root

    def properties(self, *, timeout_s: float = 30.0) -> DeviceProperties:
        """Return its properties; see `Device.properties`."""
        with self._held():
            return self._device.properties(timeout_s=timeout_s)

    def free_bytes(self, *, timeout_s: float = 30.0) -> int | None:
        """Return the free space under the work root; see `Device.free_bytes`."""
        with self._held():
            return self._device.free_bytes(timeout_s=timeout_s)

    def boot_id(self, *, timeout_s: float = 30.0) -> str:
        """Return the id of its boot; see `Device.boot_id`."""
        with self._held():
            return self._device.boot_id(timeout_s=timeout_s)

    def shell(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        stdin: bytes | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        max_output: int = 4 << 20,
    ) -> CommandResult:
        """Run a command if the fence is ours; see `Device.shell`."""
        text = command_line(command)
        with self._held(), action_named(describe_command(text, self._fence.root), failures=False):
            result = self._device.shell(
                self._fence.guarded(text),
                timeout_s=timeout_s,
                stdin=stdin,
                check=False,
                env=env,
                max_output=max_output,
            )
        self._lost_if_fenced(result)
        if check and result.exit_status:
            tail = (result.stderr if result.stderr.strip() else result.stdout)[-_LOG_TAIL:]
            shown = describe_command(text, self._fence.root).strip("`")
            raise DeviceCommandError(self.serial, shown, result.exit_status, tail)
        return result

    def stream(
        self,
        command: str | Sequence[str],
        *,
        on_output: Callable[[bytes], None],
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command if the fence is ours, and stream its output; see `Device.stream`."""
        text = command_line(command)
        with self._held(), action_named(describe_command(text, self._fence.root), failures=False):
            result = self._device.stream(
                self._fence.guarded(text), on_output=on_output, timeout_s=timeout_s, env=env
            )
        self._lost_if_fenced(result)
        return result

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
        with self._transfer():
            return self._device.push(
                local, remote, timeout_s=timeout_s, mode=mode, on_progress=on_progress
            )

    def push_many(
        self,
        items: Iterable[PushItem],
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy files in one go; see `Device.push_many`."""
        with self._transfer():
            return self._device.push_many(items, timeout_s=timeout_s, on_progress=on_progress)

    def pull(
        self,
        remote: str,
        local: Path,
        *,
        timeout_s: float = 600.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Copy a file from the device; see `Device.pull`."""
        with self._held():
            received = self._device.pull(
                remote, local, timeout_s=timeout_s, on_progress=on_progress
            )
        self._check_on_device()
        return received

    def forward(self, remote: str) -> AbstractContextManager[tuple[str, int]]:
        """Forward a port of this host to the device; see `Device.forward`."""
        self._check_on_device()
        return self._device.forward(remote)

    def reboot(self, *, timeout_s: float = 300.0) -> None:
        """Reboot it; see `Device.reboot`."""
        self._check_on_device()
        with self._held():
            self._device.reboot(timeout_s=timeout_s)

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        self._check_on_device()
        with self._held():
            yield
        self._check_on_device()

    @contextmanager
    def _held(self) -> Iterator[None]:
        self._lease.check()
        self.used = True
        try:
            yield
        except BaseException:
            self.dirty = True
            raise

    def _check_on_device(self) -> None:
        self._lease.check()
        self.used = True
        with action_named(CHECKING, failures=False):
            result = self._device.shell(self._fence.guarded(":"), timeout_s=_CHECK_S, check=False)
        self._lost_if_fenced(result)

    def _lost_if_fenced(self, result: CommandResult) -> None:
        if self._fence.was_lost(result.exit_status, result.stderr):
            raise self._lease.lose("the device went to another holder")
