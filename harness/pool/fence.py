"""Fence on a device, which refuses the commands of former holders.

The fence is a folder of the device, `WORK_ROOT/fence`, with one file, named by the token that
holds. A claim makes the file of a higher token, removes the lower ones, then kills the processes
that former holders left. Commands of a holder carry the lease's mark (`device_scripts/marked.sh`)
and first look whether the file is there. So a command either finds the fence raised, or carried
its mark when the claim looked for marks.
"""

import re
import shlex
from dataclasses import dataclass

from harness.clock import Deadline
from harness.deploy.scripts import ensure_scripts, intact, scripts_folder
from harness.devices.base import Device
from harness.devices.commands import MARKS, command_line
from harness.errors import (
    DeviceCommandError,
    DeviceFullError,
    LeaseLostError,
    NoDeviceError,
    one_line,
)
from harness.pool.action_names import CLAIMING, ENDING, SCRIPTS, action_named
from harness.pool.ledger import DeviceRecords
from harness.pool.members import Member
from harness.pool.opener import Opener, identify
from harness.pool.records import FenceRecord

_LAST_LINE = re.compile(
    r"qnnfarm-fence (?:token=(?P<token>\d{1,9}) id=(?P<id>[0-9a-f-]{36}) ended=(?P<ended>\d+)"
    r" left=(?P<left>\d+)|refused=(?P<refused>\d{1,9})|(?P<other>other))"
)
LOST_STATUS = 94
_NO_SCRIPTS = 97


class OtherDeviceError(Exception):
    """The fence is not the one in the ledger: it is another device, or it was wiped."""


class HigherTokenError(Exception):
    """A device has a higher token than ours: `args[0]`."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A fence that was claimed with our token.

    Attributes:
        id: distinguishes this device's processes from those of others on the same kernel.
        ended: number of runs of former holders that the claim ended.
    """

    root: str
    token: int
    id: str
    scripts: str
    ended: int = 0

    def guarded(self, command: str) -> str:
        """Return a command line that runs `command` only if the fence still has our token."""
        lost = f"echo {shlex.quote(self._lost_line)} >&2; exit {LOST_STATUS}"
        check = f"[ -e {shlex.quote(f'{self.root}/fence/{self.token}')} ] || {{ {lost}; }}\n"
        return check + command

    @property
    def env(self) -> dict[str, str]:
        """Environment of the holder's commands: the mark by which a later claim finds them."""
        return {MARKS: f"lease:{self.id}.{self.token}."}

    def was_lost(self, exit_status: int, stderr: str) -> bool:
        """Return whether a guarded command was refused by the fence."""
        return exit_status == LOST_STATUS and self._lost_line in stderr

    def sweep(self, device: Device, deadline: Deadline) -> None:
        """End the processes that the holder of this fence left on the device.

        Raises:
            LeaseLostError: the fence has another token.
            DeviceCommandError: a process cannot be ended.
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
    """Raise the fence of a device to `token`, and end the processes of former holders.

    Args:
        scripts: folder of our scripts on the device.

    Raises:
        HigherTokenError: the fence is higher.
        DeviceCommandError: a process of a former holder cannot be ended, or the work root cannot be
            written.
        DeviceError: the device failed otherwise.
    """
    root = device.work_root
    match = _run(device, _words(root, scripts, "claim", token), deadline, CLAIMING)
    return Fence(root, token, match["id"], scripts, int(match["ended"]))


def reclaim(device: Device, token: int, record: FenceRecord, deadline: Deadline) -> Fence:
    """Claim a device that was claimed before, in one command.

    The id of the fence shows that it is still the same device with the same work root, and the
    hashes, taken on the device before the claim, that it still has our scripts.

    Raises:
        OtherDeviceError: its fence has another id; nothing was touched.
        HigherTokenError, DeviceCommandError, DeviceError: as for `claim`; also if scripts are
            missing or changed.
    """
    scripts = scripts_folder(record.root)
    words = _words(record.root, scripts, "claim", token)
    words += [record.id, str(record.quiet)]
    command = f"{intact(scripts)} || exit {_NO_SCRIPTS}\nexec {command_line(words)}"
    match = _run(device, command, deadline, CLAIMING)
    return Fence(record.root, token, match["id"], scripts, int(match["ended"]))


def _words(root: str, scripts: str, action: str, token: int) -> list[str]:
    return ["sh", f"{scripts}/fence.sh", root, action, str(token)]


def _run(
    device: Device, command: str | list[str], deadline: Deadline, action: str
) -> re.Match[str]:
    with action_named(action):
        result = device.shell(command, timeout_s=deadline.remaining(), check=False)
    lines = result.stdout.splitlines()
    match = _LAST_LINE.fullmatch(lines[-1]) if lines else None
    if match is not None and match["refused"] is not None:
        raise HigherTokenError(int(match["refused"]))
    if match is not None and match["other"] is not None:
        raise OtherDeviceError
    if match is None or result.exit_status:
        output = one_line(result.stderr) or one_line(result.stdout)
        raise DeviceCommandError(device.serial, action, result.exit_status, output)
    return match


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device whose fence holds the token of a lease."""

    member: str
    key: str
    device: Device
    fence: Fence


class FenceClaims:
    """Claims granted devices, with one command if the ledger has the fence of the device.

    While its fence has the same id, a device is neither another nor wiped, and need not be asked
    who it is.
    """

    def __init__(self, records: DeviceRecords, opener: Opener, *, timeout_s: float) -> None:
        self._records = records
        self._opener = opener
        self._timeout_s = timeout_s

    def claim(
        self, token: int, key: str, member: Member, *, min_free_bytes: int = 0
    ) -> ClaimedDevice:
        """Raise the fence of a granted device.

        Raises:
            HigherTokenError: the device has a higher token.
            DeviceFullError: less than `min_free_bytes` is free.
            NoDeviceError: another device answers at its address.
            DeviceError: the device failed otherwise.
        """
        device = self._opener.open(member)
        deadline = Deadline.for_device(device.serial, CLAIMING, self._timeout_s)
        fence = self._fence(token, key, member, device, deadline)
        if min_free_bytes:
            free = device.free_bytes(timeout_s=deadline.remaining())
            self._records.set_free_bytes(key, free)
            if free is not None and free < min_free_bytes:
                raise DeviceFullError(device.serial, device.work_root, min_free_bytes, free)
        return ClaimedDevice(member.name, key, device, fence)

    def _fence(
        self, token: int, key: str, member: Member, device: Device, deadline: Deadline
    ) -> Fence:
        record = self._records.fence_of(key)
        if record.id and record.root:
            try:
                return reclaim(device, token, record, deadline)
            except (OtherDeviceError, DeviceCommandError):
                pass  # wiped, another device, or other scripts: claim it from scratch
        reached = identify(member, device, timeout_s=deadline.remaining())
        if reached.key != key:
            self._records.record_found(reached.key, member.name, str(member.spec), reached.facts)
            other = reached.key.removeprefix("hardware:")
            raise NoDeviceError(member.name, (f"{device.serial} is another device now: {other}",))
        with action_named(SCRIPTS):
            scripts = ensure_scripts(device, deadline)
        fence = claim(device, token, scripts, deadline)
        self._records.set_fence(key, FenceRecord(fence.id, fence.root))
        return fence
