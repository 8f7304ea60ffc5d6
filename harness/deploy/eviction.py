"""Disk usage of a device's store, and eviction of its least recently used contents."""

import re
import shlex
from dataclasses import dataclass

from harness.clock import Deadline
from harness.deploy.digests import STEP_S
from harness.devices.device import Device
from harness.errors import DeviceCommandError, DeviceFullError

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
    """Contents of the store of a device, least recently used first."""

    entries: tuple[StoreEntry, ...]

    @property
    def total_bytes(self) -> int:
        """Sum of all sizes."""
        return sum(entry.size for entry in self.entries)


def read_usage(device: Device, deadline: Deadline) -> StoreUsage:
    """Return the contents of the store, without hashing them."""
    script = (
        f"cd {shlex.quote(device.work_root)}/store 2>/dev/null || exit 0\n"
        "find . -maxdepth 1 -type f -exec stat -c '%n %s %Z' {} +\n"
        "[ ! -d .memo ] || find .memo -type f -exec stat -c '%n %Y' {} +"
    )
    lines = device.shell(script, timeout_s=deadline.at_most(STEP_S)).stdout.splitlines()
    used_at = {m[1]: int(m[2]) for m in map(_MEMO.fullmatch, lines) if m}
    contents = filter(None, map(_CONTENT.fullmatch, lines))
    entries = [StoreEntry(m[1], int(m[2]), used_at.get(m[1], int(m[3]))) for m in contents]
    return StoreUsage(tuple(sorted(entries, key=lambda entry: entry.used_at)))


_EVICTION_S = 300.0
_BLOCK = 4096
_KIB_MAX = 999_999_999
_FACT = re.compile(r"^(free|store|evictable)_kb=([0-9]{0,9})$", re.MULTILINE)
_LAST = re.compile(
    r"^qnnfarm-evict evicted=([0-9]{1,9}) evicted_kb=([0-9]{1,12}) met=([01])$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """Space that a deployment leaves to others on the device.

    Attributes:
        keep_free_bytes: stays free after the push.
        max_store_bytes: limit of the content store; `None`: as far as there is room.
            Deployments at the same time ask each for itself, and may pass it together until the
            next one.
    """

    keep_free_bytes: int = 8 << 20
    max_store_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """Result of an eviction, rounded to KiB.

    Attributes:
        free_bytes: `None` where the device does not tell.
        evictable_bytes: contents of the store that neither a run nor a deployment uses.
        evicted_files: number of evicted contents.
        met: whether there is as much room as was asked for.
    """

    free_bytes: int | None
    store_bytes: int
    evictable_bytes: int
    evicted_files: int
    evicted_bytes: int
    met: bool


def bytes_on_disk(size: int) -> int:
    """Return the space that a file of `size` bytes takes."""
    return -(-size // _BLOCK) * _BLOCK


def make_room(
    device: Device,
    scripts_dir: str,
    deadline: Deadline,
    policy: EvictionPolicy,
    incoming_bytes: int,
) -> Room:
    """Evict the least recently used contents until `incoming_bytes` more fit, if that helps.

    Contents that a run folder links to, or that a deployment under way needs, stay.
    """
    limit = policy.max_store_bytes
    words = [
        "sh",
        f"{scripts_dir}/evict.sh",
        device.work_root,
        str(_kib_up(policy.keep_free_bytes + incoming_bytes)),
        "-" if limit is None else str(min(_KIB_MAX, max(0, limit - incoming_bytes) >> 10)),
    ]
    result = device.shell(words, timeout_s=deadline.at_most(_EVICTION_S), check=False)
    facts = dict(_FACT.findall(result.stdout))
    last = _LAST.search(result.stdout)
    if last is None or len(facts) != len(("free", "store", "evictable")):
        log = result.stderr.strip() or result.stdout
        raise DeviceCommandError(device.serial, shlex.join(words), result.exit_status, log)
    too_big = limit is not None and incoming_bytes > limit
    return Room(
        free_bytes=int(facts["free"]) << 10 if facts["free"] else None,
        store_bytes=int(facts["store"] or 0) << 10,
        evictable_bytes=int(facts["evictable"] or 0) << 10,
        evicted_files=int(last[1]),
        evicted_bytes=int(last[2]) << 10,
        met=last[3] == "1" and not too_big,
    )


def require_room(
    device: Device,
    scripts_dir: str,
    deadline: Deadline,
    policy: EvictionPolicy,
    incoming_bytes: int,
) -> Room:
    """Make room as `make_room` does.

    Raises:
        DeviceFullError: there is not enough room, and nothing was evicted.
    """
    room = make_room(device, scripts_dir, deadline, policy, incoming_bytes)
    if not room.met:
        free = room.free_bytes
        needed = incoming_bytes + policy.keep_free_bytes
        limit = policy.max_store_bytes
        if limit is not None and (free is None or free >= needed):
            needed, free = incoming_bytes, max(0, limit - room.store_bytes)
        raise DeviceFullError(device.serial, device.work_root, needed, free, room.evictable_bytes)
    return room


def _kib_up(size: int) -> int:
    return min(_KIB_MAX, -(-size // 1024))
