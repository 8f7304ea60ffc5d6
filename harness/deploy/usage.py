"""What the content store of a device holds."""

import re
import shlex
from dataclasses import dataclass

from harness.clock import Deadline
from harness.devices.base import Device

_CONTENT = re.compile(r"(?:\./)?([0-9a-f]{64}) ([0-9]{1,18}) ([0-9]{1,18})")
_MEMO = re.compile(r"(?:\./)?\.memo/([0-9a-f]{64}) ([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """A content that a device holds.

    Attributes:
        used_at: when it was last linked into a run or put there, in seconds since 1970 by the
            device's clock.
    """

    sha256: str
    size: int
    used_at: int


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What the store of a device holds, that which was not used for longest first."""

    entries: tuple[StoreEntry, ...]

    @property
    def total_bytes(self) -> int:
        """Sum of all sizes."""
        return sum(entry.size for entry in self.entries)


def read_usage(device: Device, deadline: Deadline) -> StoreUsage:
    """What is in the store, without hashing it.

    Raises:
        DeviceLostError, DeviceTimeoutError: see `Device`.
    """
    script = (
        f"cd {shlex.quote(device.work_root)}/store 2>/dev/null || exit 0\n"
        "find . -maxdepth 1 -type f -exec stat -c '%n %s %Z' {} +\n"
        "[ ! -d .memo ] || find .memo -type f -exec stat -c '%n %Y' {} +"
    )
    lines = device.shell(script, timeout_s=deadline.remaining()).stdout.splitlines()
    used = {m[1]: int(m[2]) for m in map(_MEMO.fullmatch, lines) if m}
    contents = filter(None, map(_CONTENT.fullmatch, lines))
    entries = [StoreEntry(m[1], int(m[2]), used.get(m[1], int(m[3]))) for m in contents]
    return StoreUsage(tuple(sorted(entries, key=lambda entry: entry.used_at)))
