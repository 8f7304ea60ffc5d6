"""Fence on a device, which refuses the commands of former holders.

The fence is a folder of the device, `WORK_ROOT/fence`, with one file, named by the token that
holds, the ledger that granted it, and the nonce of its grant. A claim makes the file of a higher
token, removes the lower ones, then kills the processes that former holders left. Commands of a
holder carry the lease's mark (`device_scripts/marked.sh`) and first look whether the file is there.
So a command either finds the fence raised, or carried its mark when the claim looked for marks.

The file names the holder. A claim names the earlier grants of its ledger, which have ended. A
holder that is none of these, of another ledger or of a copy of this one, keeps the device until it
has given it back.
"""

import json
import re
import shlex
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Self

from harness.clock import Deadline
from harness.deploy.scripts import (
    CLAIMING,
    ENDING,
    SCRIPTS,
    action_named,
    ensure_scripts,
    intact,
    scripts_folder,
)
from harness.deploy.store import DISK_FULL
from harness.devices.commands import MARKS, command_line
from harness.devices.device import Device
from harness.errors import (
    DeviceCommandError,
    DeviceFullError,
    DeviceHeldError,
    HarnessError,
    LeaseLostError,
    NoDeviceError,
    one_line,
)
from harness.pool.context import PoolContext
from harness.pool.ledger import Ledger
from harness.pool.members import Member
from harness.pool.opener import identify
from harness.pool.owner import Owner, has_ended, this_process
from harness.pool.records import FenceRecord, LeaseRow

_LAST_LINE = re.compile(
    r"qnnfarm-fence (?:token=(?P<token>\d{1,9}) id=(?P<id>[0-9a-f-]{36}) ended=(?P<ended>\d{1,9})"
    r" left=(?P<left>\d{1,9})|refused=(?P<refused>\d{1,9}) (?P<above>.{0,2000})"
    r"|held=(?P<held>\d{1,9}(?:-[0-9a-f]{1,64}){0,2}) (?P<other_holder>.{0,2000})|(?P<other>other))"
)
LOST_STATUS = 94
_NO_SCRIPTS = 97
_GIVE_BACK_S = 5.0
_SHOWN = 2000
_NOT_HELD = "-"
_TRIES = 8
"""A claim that a device refuses so often is not made again."""


class OtherDeviceError(Exception):
    """The fence is not the one in the ledger: it is another device, or it was wiped."""


class HigherTokenError(Exception):
    """A device has a later grant of our ledger: `args[0]` is its token, `args[1]` its `Owner`."""


class OtherHolderError(Exception):
    """A holder that the claim did not name has not given the device back.

    `args`: the name of its file in the fence, and its `Owner`.
    """


@dataclass(frozen=True, slots=True)
class Fence:
    """A fence with the token of a lease, on a device of the pool.

    Attributes:
        member: name of the device in the pool.
        key: of the device in the ledger.
        device: without the checks of a lease.
        ledger: id of the ledger that granted the lease.
        grant: the nonce of the lease.
        holder: its `Owner`, as JSON.
        root: the work root; like `id`, empty until the fence is raised.
        id: distinguishes this device's processes from those of others on the same kernel.
    """

    member: str
    key: str
    device: Device
    token: int
    ledger: str = ""
    grant: str = ""
    holder: str = ""
    root: str = ""
    id: str = ""

    @property
    def scripts(self) -> str:
        """Folder of our scripts on the device."""
        return scripts_folder(self.root)

    def guarded(self, command: str) -> str:
        """Return a command that runs only if the fence has our token; else it names the holder."""
        fence = shlex.quote(f"{self.root}/fence")
        lost = (
            f"{{ echo {shlex.quote(self._lost_line)}; cat {fence}/[0-9]* 2>/dev/null |"
            f" head -c {_SHOWN}; }} >&2; exit {LOST_STATUS}"
        )
        return f"[ -e {self._file} ] || {{ {lost}; }}\n{command}"

    @property
    def env(self) -> dict[str, str]:
        """Environment of the holder's commands: the mark by which a later claim finds them."""
        return {MARKS: f"lease:{self.id}.{self._name}."}

    def was_lost(self, exit_status: int, stderr: str) -> bool:
        """Return whether a guarded command was refused by the fence."""
        return exit_status == LOST_STATUS and self._lost_line in stderr

    def describe_loss(self, stderr: str, now: float) -> str:
        """Return the holder of the device, for people, from the output of a refused command."""
        _, _, refusal = stderr.partition(self._lost_line)
        grant, _, record = refusal.strip().partition("\n")[0].partition(" ")
        if not grant:
            return "its fence on the device is gone: somebody removed our work root there"
        if grant.partition("-")[0] == self.ledger:
            return "the device went to another holder"
        return f"{Owner.parse(record).describe(now)}, has the device through another ledger"

    def give_back(self) -> None:
        """Tell other ledgers on the device that nobody holds it any more, if it can be told."""
        line = shlex.quote(f"{_NOT_HELD} {self.holder}")
        command = f"[ ! -e {self._file} ] || printf '%s\\n' {line} >{self._file}"
        with suppress(HarnessError), action_named(ENDING):
            self.device.shell(command, timeout_s=_GIVE_BACK_S, check=False)

    def sweep(self, deadline: Deadline) -> None:
        """End the processes that the holder of this fence left on the device."""
        try:
            self._run(self._words("sweep"), deadline, ENDING)
        except HigherTokenError as error:
            reason = f"the device went to token {error.args[0]}, of {error.args[1]}"
            raise LeaseLostError(self.device.serial, self.token, reason) from None

    def raised(self, deadline: Deadline, record: FenceRecord, take: Collection[str]) -> Self:
        """Raise it on the device, and end the processes of former holders.

        Args:
            record: the fence of a former claim. Its id shows that this is still the same device
                with the same work root, and hashes, taken on the device before, that it still has
                our scripts, which must have been brought there otherwise.
            take: files in the fence of the holders that lose the device.

        Raises:
            OtherDeviceError, HigherTokenError, OtherHolderError: nothing was touched.
            DeviceCommandError: a process of a former holder cannot be ended, or a script of a known
                fence is missing or changed.
        """
        quiet = self.file_of(record.quiet) if record.quiet else ""
        command = command_line(self._words("claim", record.id, quiet, ",".join(take)))
        if record.id:
            # Another user of the ledger could name a folder of theirs.
            ours = f"[ -O {shlex.quote(self.root)} ] && {intact(self.scripts)}"
            command = f"{ours} || exit {_NO_SCRIPTS}\nexec {command}"
        return replace(self, id=self._run(command, deadline, CLAIMING)["id"])

    def file_of(self, name: str) -> str:
        """Return the file of a grant of this ledger, by its name `TOKEN-NONCE`."""
        token, _, grant = name.partition("-")
        return f"{token}-{self.ledger}-{grant}"

    def _words(self, action: str, *words: str) -> list[str]:
        script, holder = f"{self.scripts}/fence.sh", f"{self.ledger}-{self.grant} {self.holder}"
        return ["sh", script, self.root, action, str(self.token), holder, *words]

    @property
    def _name(self) -> str:
        return self.file_of(f"{self.token}-{self.grant}")

    @property
    def _file(self) -> str:
        return shlex.quote(f"{self.root}/fence/{self._name}")

    @property
    def _lost_line(self) -> str:
        return f"qnnfarm-fence lost {self.id}.{self._name}"

    def _run(self, command: str | list[str], deadline: Deadline, action: str) -> re.Match[str]:
        device = self.device
        with action_named(action):
            result = device.shell(command, timeout_s=deadline.remaining(), check=False)
        lines = result.stdout.splitlines()
        match = _LAST_LINE.fullmatch(lines[-1]) if lines else None
        if match is not None and match["refused"] is not None:
            raise HigherTokenError(int(match["refused"]), Owner.parse(match["above"]))
        if match is not None and match["held"] is not None:
            raise OtherHolderError(match["held"], Owner.parse(match["other_holder"]))
        if match is not None and match["other"] is not None:
            raise OtherDeviceError
        if DISK_FULL in result.stderr:
            raise DeviceFullError(device.serial, device.work_root, None, None)
        if match is None or result.exit_status:
            output = one_line(result.stderr) or one_line(result.stdout)
            raise DeviceCommandError(device.serial, action, result.exit_status, output)
        return match


def claim(
    context: PoolContext,
    lease: LeaseRow,
    member: Member,
    *,
    min_free_bytes: int = 0,
    from_others: bool = False,
) -> Fence:
    """Raise the fence of a granted device, and return it.

    It takes one command if the ledger has the fence: while that has the same id, a device is
    neither another nor wiped, and need not be asked for its identity. What the device says changes
    the ledger's state of this device alone.

    Args:
        from_others: take the device even from a holder that this ledger did not grant it to.

    Raises:
        LeaseLostError: the ledger has given the device to another holder.
        DeviceHeldError: a holder of another ledger, or of a copy of this one, has it.
        NoDeviceError: another device answers at its address.
    """
    key, ledger, clock = lease.key, context.ledger, context.clock
    device = context.opener.open(member)
    deadline = Deadline.for_device(device.serial, CLAIMING, context.config.lease.claim_timeout_s)
    holder = json.dumps(asdict(replace(this_process(), since=clock.now())))
    of_lease = lease.token, ledger.ledger_id(), lease.grant, holder
    fence = Fence(member.name, key, device, *of_lease)
    take = [fence.file_of(name) for name in ledger.former_grants(lease)]
    for _ in range(_TRIES):
        try:
            fence = _raise(ledger, fence, take, member, deadline)
            break
        except HigherTokenError as error:
            higher, other = error.args
            reason = f"the device has token {higher}, of {other}"
            token = ledger.pass_token(key, lease.grant, higher, reason)
            if token is None and ledger.holds(lease.grant, key):
                reason += ", which no grant explains"
                raise DeviceCommandError(device.serial, CLAIMING, 3, reason) from None
            if token is None:
                raise LeaseLostError(member.name, fence.token, reason) from None
            fence = replace(fence, token=token)
        except OtherHolderError as error:
            other_file, former = error.args
            described = former.describe(clock.now())
            is_copy = other_file.split("-")[1:2] == [fence.ledger]
            if not (from_others or (former.boot and has_ended(former))):
                raise DeviceHeldError(member.name, described, is_copy=is_copy) from None
            whose = "a copy of this ledger" if is_copy else "another ledger"
            ledger.add_history(key, "taken", f"from {described}, of {whose}")
            take.append(other_file)
    else:
        reason = f"it refused {_TRIES} claims, for one reason after the other"
        raise DeviceCommandError(device.serial, CLAIMING, 3, reason)
    if min_free_bytes:
        free = device.free_bytes(timeout_s=deadline.remaining())
        ledger.set_free_bytes(key, free)
        if free is not None and free < min_free_bytes:
            fence.give_back()
            raise DeviceFullError(device.serial, device.work_root, min_free_bytes, free)
    return fence


def _raise(
    ledger: Ledger, fence: Fence, take: Collection[str], member: Member, deadline: Deadline
) -> Fence:
    key, device = fence.key, fence.device
    record = ledger.fence_of(key)
    if record.id and record.root:
        try:
            return replace(fence, root=record.root).raised(deadline, record, take)
        except (OtherDeviceError, DeviceCommandError):
            pass  # wiped, another device, or other scripts: claim it from scratch
    reached = identify(member, device, ledger, timeout_s=deadline.remaining())
    if reached.key != key:
        ledger.record_found(reached.key, member.name, str(member.spec), reached.facts)
        other = reached.key.removeprefix("hardware:")
        raise NoDeviceError(member.name, (f"{device.serial} is another device now: {other}",))
    with action_named(SCRIPTS):
        ensure_scripts(device, deadline)
    raised = replace(fence, root=device.work_root).raised(deadline, FenceRecord(), take)
    ledger.set_fence(key, FenceRecord(raised.id, raised.root))
    return raised
