"""A device as its holder sees it: every call looks first whether the lease still holds."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from harness.devices.base import CommandResult, Device, DeviceProperties, Progress, PushItem
from harness.devices.commands import command_line
from harness.errors import DeviceCommandError, LeaseLostError
from harness.pool.action_names import CHECKING, in_words, renamed
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

    Every method raises `LeaseLostError` before it touches the device when the lease is lost.
    Commands check on the device itself that it did not go to another, and so do transfers before
    and after: that is what stops a holder that was suspended in the middle.

    Attributes:
        member: the name by which the pool knows it.
        used: whether anything was asked of it under this lease.
        dirty: whether something was cut off on it, so that processes may have stayed.
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
        """What keeps former holders away from it."""
        return self._fence

    @property
    def unleased(self) -> Device:
        """The device itself, for the pool's own work on it."""
        return self._device

    @property
    def serial(self) -> str:
        """The name by which it is addressed."""
        return self._device.serial

    @property
    def type(self) -> str:
        """How it is reached."""
        return self._device.type

    @property
    def work_root(self) -> str:
        """The folder on it that is ours."""
        return self._fence.root

    def properties(self, *, timeout_s: float = 30.0) -> DeviceProperties:
        """What it says of itself now."""
        with self._held():
            return self._device.properties(timeout_s=timeout_s)

    def free_bytes(self, *, timeout_s: float = 30.0) -> int | None:
        """What may still be written under the work root."""
        with self._held():
            return self._device.free_bytes(timeout_s=timeout_s)

    def boot_id(self, *, timeout_s: float = 30.0) -> str:
        """What is another one after each boot."""
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
        """Run a command while the fence is ours; see `Device.shell`."""
        text = command_line(command)
        with self._held(), renamed(in_words(text, self._fence.root)):
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
            shown = in_words(text, self._fence.root).strip("`")
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
        """Run a command while the fence is ours, and hand on its output; see `Device.stream`."""
        text = command_line(command)
        with self._held(), renamed(in_words(text, self._fence.root)):
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
        """An address of this host that leads to a port of the device; see `Device.forward`."""
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
        with renamed(CHECKING):
            result = self._device.shell(self._fence.guarded(":"), timeout_s=_CHECK_S, check=False)
        self._lost_if_fenced(result)

    def _lost_if_fenced(self, result: CommandResult) -> None:
        if self._fence.was_lost(result.exit_status, result.stderr):
            raise self._lease.lose("the device went to another holder")
