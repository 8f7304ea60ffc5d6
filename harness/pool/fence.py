"""The fence on a device, which lets no command of a former holder through.

It is a folder of the device, `WORK_ROOT/fence`, with one file named by the token that holds. A
claim makes the file of a higher token and removes the lower ones, then kills what former holders
left. Commands of a holder run as `sh -c` with a marker in its environment; the first thing that
shell does is to look whether its file is there. So a command either finds the fence raised, or
carried its marker when the claim looked for markers.
"""

import re
import shlex
from dataclasses import dataclass

from harness.clock import Deadline
from harness.deploy.scripts import ensure_scripts, intact, scripts_folder
from harness.devices.base import Device
from harness.devices.commands import command_line
from harness.errors import (
    DeviceCommandError,
    DeviceFullError,
    LeaseLostError,
    NoDeviceError,
    one_line,
)
from harness.pool.action_names import CLAIMING, ENDING, SCRIPTS, named
from harness.pool.ledger import DeviceRecords
from harness.pool.members import Member
from harness.pool.opening import Opener, identify
from harness.pool.records import FenceRecord

_LAST_LINE = re.compile(
    r"qnnfarm-fence (?:token=(?P<token>\d{1,9}) id=(?P<id>[0-9a-f-]{36}) ended=(?P<ended>\d+)"
    r" left=(?P<left>\d+)|refused=(?P<refused>\d{1,9})|(?P<other>other))"
)
LOST_STATUS = 94
_NO_SCRIPTS = 97


class OtherDeviceError(Exception):
    """The fence is not the one that is known of the device: it is another, or was wiped."""


class HigherTokenError(Exception):
    """A device knows of a higher token than ours; `args[0]` is that."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A fence that holds our token, or did when it was claimed.

    Attributes:
        id: what tells this device's processes from those of others on the same kernel.
        ended: how many runs of former holders the claim ended.
    """

    root: str
    token: int
    id: str
    scripts: str
    ended: int = 0

    def guarded(self, command: str) -> str:
        """A command line that runs `command` only if the fence still holds our token."""
        lost = f"echo {shlex.quote(self._lost_line)} >&2; exit {LOST_STATUS}"
        check = f"[ -e {shlex.quote(f'{self.root}/fence/{self.token}')} ] || {{ {lost}; }}\n"
        marker = f"export QNNFARM_FENCE={self.id}.{self.token}.;"
        return f"{marker} exec sh -c {shlex.quote(check + command)}"

    def was_lost(self, exit_status: int, stderr: str) -> bool:
        """Whether a guarded command ended because the fence is another's."""
        return exit_status == LOST_STATUS and self._lost_line in stderr

    def sweep(self, device: Device, deadline: Deadline) -> None:
        """End what the holder of this fence left behind on the device.

        Raises:
            LeaseLostError: the fence is another's.
            DeviceCommandError: something cannot be ended.
        """
        try:
            _run(device, self._words("sweep"), deadline, ENDING)
        except HigherTokenError as error:
            reason = f"the device went to token {error.args[0]}"
            raise LeaseLostError(device.serial, self.token, reason) from None

    @property
    def _lost_line(self) -> str:
        return f"qnnfarm-fence lost {self.id}.{self.token}"

    def _words(self, action: str) -> list[str]:
        return _words(self.root, self.scripts, action, self.token)


def claim(device: Device, token: int, scripts: str, deadline: Deadline) -> Fence:
    """Raise the fence of a device to `token`, and end what former holders left on it.

    Args:
        scripts: the folder of our scripts on the device, where they have been brought.

    Raises:
        HigherTokenError: it is higher already.
        DeviceCommandError: something of a former holder cannot be ended, or the work root cannot
            be written.
        DeviceError: the device failed otherwise.
    """
    root = device.work_root
    match = _run(device, _words(root, scripts, "claim", token), deadline, CLAIMING)
    return Fence(root, token, match["id"], scripts, int(match["ended"]))


def reclaim(device: Device, token: int, known: FenceRecord, deadline: Deadline) -> Fence:
    """The same for a device that was claimed before, in one command.

    It asks nothing that the device has said before. The id of the fence tells that it is still
    the same device with the same work root, and the hashes, taken on the device in front of the
    claim, that it still has our scripts.

    Raises:
        OtherDeviceError: its fence has another id; nothing was touched.
        HigherTokenError, DeviceCommandError, DeviceError: as of `claim`; also where the scripts
            are not there or changed.
    """
    scripts = scripts_folder(known.root)
    words = _words(known.root, scripts, "claim", token)
    words += [known.id, str(known.quiet)]
    command = f"{intact(scripts)} || exit {_NO_SCRIPTS}\nexec {command_line(words)}"
    match = _run(device, command, deadline, CLAIMING)
    return Fence(known.root, token, match["id"], scripts, int(match["ended"]))


def _words(root: str, scripts: str, action: str, token: int) -> list[str]:
    return ["sh", f"{scripts}/fence.sh", root, action, str(token)]


def _run(
    device: Device, command: str | list[str], deadline: Deadline, action: str
) -> re.Match[str]:
    with named(action):
        result = device.shell(command, timeout_s=deadline.remaining(), check=False)
    lines = result.stdout.splitlines()
    match = _LAST_LINE.fullmatch(lines[-1]) if lines else None
    if match is not None and match["refused"] is not None:
        raise HigherTokenError(int(match["refused"]))
    if match is not None and match["other"] is not None:
        raise OtherDeviceError
    if match is None or result.exit_status:
        said = one_line(result.stderr) or one_line(result.stdout)
        raise DeviceCommandError(device.serial, action, result.exit_status, said)
    return match


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device whose fence holds the token of a lease."""

    member: str
    key: str
    device: Device
    fence: Fence


class FenceClaims:
    """Raises fences, in one command where the ledger remembers the device's.

    While its fence has the id that it had, a device is neither another nor wiped, and need not be
    asked who it is.
    """

    def __init__(self, register: DeviceRecords, opener: Opener, *, timeout_s: float) -> None:
        self._register = register
        self._opener = opener
        self._timeout_s = timeout_s

    def claim(
        self, token: int, key: str, member: Member, *, min_free_bytes: int = 0
    ) -> ClaimedDevice:
        """Raise the fence of a device that was granted.

        Raises:
            HigherTokenError: the device knows of a higher token.
            DeviceFullError: less than `min_free_bytes` is free.
            NoDeviceError: another device answers at its address.
            DeviceError: it fails.
        """
        device = self._opener.open(member)
        deadline = Deadline.for_device(device.serial, CLAIMING, self._timeout_s)
        fence = self._fence(token, key, member, device, deadline)
        if min_free_bytes:
            free = device.free_bytes(timeout_s=deadline.remaining())
            self._register.set_free_bytes(key, free)
            if free is not None and free < min_free_bytes:
                raise DeviceFullError(device.serial, device.work_root, min_free_bytes, free)
        return ClaimedDevice(member.name, key, device, fence)

    def _fence(
        self, token: int, key: str, member: Member, device: Device, deadline: Deadline
    ) -> Fence:
        known = self._register.fence_of(key)
        if known.id and known.root:
            try:
                return reclaim(device, token, known, deadline)
            except (OtherDeviceError, DeviceCommandError):
                pass  # wiped, or another device: the long way says
        reached = identify(member, device, timeout_s=deadline.remaining())
        if reached.key != key:
            self._register.record_found(reached.key, member.name, str(member.spec), reached.facts)
            other = reached.key.removeprefix("hardware:")
            raise NoDeviceError(member.name, (f"{device.serial} is another device now: {other}",))
        with named(SCRIPTS):
            scripts = ensure_scripts(device, deadline)
        fence = claim(device, token, scripts, deadline)
        self._register.set_fence(key, FenceRecord(fence.id, fence.root))
        return fence
