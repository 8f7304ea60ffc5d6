"""The content store of a device: `WORK_ROOT/store/SHA256`.

Files are pushed into an area of one deployment alone, `incoming/RANDOM`, and moved into the store
by `verify.sh -a`, which hashes each on the device first. So an interruption at any point leaves no
bad entry, and several hosts may fill one store. Files that had arrived whole before an interruption
are found by `verify.sh -a` of any later deployment, which hashes and takes them.

The area also holds the list of the deployment's contents, which `evict.sh` leaves alone.
The least recently used contents go where the disk gets full. The next batch of a push is on its way
while the device hashes the last one.
"""

import contextlib
import re
import secrets
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.clock import Deadline
from harness.deploy.deployment import Progress
from harness.deploy.digests import STEP_S, FileDigest, hashes_on, hashing_s
from harness.devices.base import PushItem
from harness.devices.device import Device
from harness.errors import (
    DeploymentCorruptError,
    DeviceCommandError,
    DeviceFullError,
    DeviceTimeoutError,
    HarnessError,
)
from harness.words import pluralize

BATCH_BYTES = 16 << 20


def batches(contents: Iterable[FileDigest], at_least: int = BATCH_BYTES) -> list[list[FileDigest]]:
    """Return groups of at least `at_least` bytes each but for the last, the largest files first.

    One group is hashed on the device while the next is sent: after the last byte only the last
    group, which has the smallest files, is still to be hashed.
    """
    groups: list[list[FileDigest]] = []
    size = at_least
    for digest in sorted(contents, key=lambda digest: (-digest.size, digest.sha256)):
        if size >= at_least:
            groups.append([])
            size = 0
        groups[-1].append(digest)
        size += digest.size
    return groups


Verify = Callable[[Sequence[FileDigest]], None]
"""Hashes contents on the device and moves the good ones into the store; raises for the others."""


def push_verified(
    device: Device,
    deadline: Deadline,
    contents: Mapping[FileDigest, Path],
    folder: str,
    verify: Verify,
    on_progress: Progress | None,
) -> None:
    """Bring all of `contents` to `folder` on the device under their hashes, and verify them.

    Pushes run on the caller's thread; hashing on the device is waited for on another. After an
    error, a hashing under way is not waited for: it does no harm.

    Raises:
        DeploymentCorruptError: one arrived with another content; later ones are not pushed.
    """
    total = sum(digest.size for digest in contents)
    total_sent = 0
    hashings: list[Future[None]] = []

    def progress(count: int) -> None:
        nonlocal total_sent
        total_sent += count
        for hashing in hashings:
            if hashing.done():
                hashing.result()
        if on_progress:
            on_progress(total_sent, total)

    worker = ThreadPoolExecutor(1, thread_name_prefix="verify")
    try:
        for batch in batches(contents):
            items = [PushItem(contents[d], f"{folder}/{d.sha256}") for d in batch]
            device.push_many(items, timeout_s=deadline.remaining(), on_progress=progress)
            hashings.append(worker.submit(verify, batch))
        for hashing in hashings:
            hashing.result()
    finally:
        worker.shutdown(wait=False, cancel_futures=True)


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


_CLEAN_TIMEOUT_S = 10.0
DISK_FULL = "the file system is full or read-only"
"""Words of the device scripts for a write that fails; see `device_scripts/common.sh`."""
_ANSWER = re.compile(r"(ok|adopted|missing|bad) ([0-9a-f]{64})")
_RUN_DIR = re.compile(r"^run_dir=(/.{1,4000})$", re.MULTILINE)


class DeviceStore(AbstractContextManager["DeviceStore"]):
    """The store of `device` during one deployment, worked on by the scripts in `scripts_dir` there.

    When the block is left by an error, files that have arrived whole stay for the next deployment.
    """

    def __init__(
        self, device: Device, scripts_dir: str, deadline: Deadline, policy: EvictionPolicy
    ) -> None:
        self._device = device
        self._scripts = scripts_dir
        self._deadline = deadline
        self._policy = policy
        self._area = secrets.token_hex(8)
        self._pushing: tuple[FileDigest, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, HarnessError) and error.loses_device):
            return  # `link` has cleaned up; or nobody is there to do it
        keep = () if isinstance(error, DeviceFullError | DeploymentCorruptError) else self._pushing
        with contextlib.suppress(HarnessError):
            self._settle(keep)

    def holds(self, contents: Sequence[FileDigest]) -> Mapping[str, str]:
        """Return the contents that the device holds, hashed there: `ok` or `adopted` by SHA-256.

        `adopted`: an interrupted deployment had pushed it. From here on, nothing of `contents` is
        evicted. Entries of the store with a wrong content are removed.

        Raises:
            DeviceFullError: not even a list can be written.
        """
        script = (
            f"cd {self._root} 2>/dev/null && [ -d store ] && [ -d incoming ] && [ -d runs ] ||\n"
            f"  {self._script('setup.sh')} {self._root} >/dev/null || exit\n"
            f"exec {self._script('verify.sh')} -a -p {self._area} {self._root}"
        )
        try:
            answers = self._verify(script, contents)
        except DeviceFullError:
            if not make_room(self._device, self._scripts, self._deadline, self._policy, 0).met:
                raise
            answers = self._verify(script, contents)
        bad = [sha256 for sha256, answer in answers.items() if answer == "bad"]
        if bad:
            paths = " ".join(f"store/{sha256}" for sha256 in bad)
            self._shell(f"cd {self._root} && rm -rf {paths}")
        return {sha: answer for sha, answer in answers.items() if answer in {"ok", "adopted"}}

    def add(
        self, contents: Mapping[FileDigest, Path], on_progress: Progress | None = None
    ) -> Room | None:
        """Bring files of this host into the store; gives the room that was made for them.

        Raises:
            DeviceFullError: they do not fit.
            DeploymentCorruptError: one arrived with another content; it was removed.
        """
        if not contents:
            return None
        needed = sum(bytes_on_disk(digest.size) for digest in contents)
        room = require_room(self._device, self._scripts, self._deadline, self._policy, needed)
        self._pushing = tuple(contents)
        folder = f"{self._device.work_root}/incoming/{self._area}"

        def verify(batch: Sequence[FileDigest]) -> None:
            self._adopt(batch, contents)

        try:
            push_verified(self._device, self._deadline, contents, folder, verify, on_progress)
        except DeviceFullError:
            raise self._full(needed) from None
        return room

    def link(self, run_id: str, files: Sequence[tuple[str, FileDigest, bool]]) -> str:
        """Make the folder of a run out of (name, content, executable); gives its path.

        Raises:
            DeviceCommandError: the run exists already, or a content is not in the store.
        """
        lines = [
            f"{digest.sha256} {name} {'0755' if executable else '0644'}\n"
            for name, digest, executable in files
        ]
        link = f"{self._script('link.sh')} {self._root} {shlex.quote(run_id)}"
        output = self._shell(f"{link} || exit\n{self._remove_area}", "".join(lines))
        folder = _RUN_DIR.search(output)
        if folder is None:
            raise DeviceCommandError(self._device.serial, link, 0, output)
        return folder[1]

    def _adopt(self, batch: Sequence[FileDigest], contents: Mapping[FileDigest, Path]) -> None:
        """Move files from the area into the store, each after it was hashed there."""
        script = (
            f"cd {self._root} && touch incoming/{self._area}/.wants || exit\n"
            f"exec {self._script('verify.sh')} -a ."
        )
        answers = self._verify(script, batch)
        for digest in batch:
            if answers.get(digest.sha256) not in {"ok", "adopted"}:
                folder = f"{self._device.work_root}/incoming/{self._area}"
                name, left_s = digest.sha256, self._deadline.at_most(hashing_s([digest]))
                device_hash = hashes_on(self._device, folder, [name], timeout_s=left_s).get(
                    name, ""
                )
                raise DeploymentCorruptError(
                    self._device.serial, contents[digest].name, digest.sha256, device_hash
                )

    def _settle(self, keep: Sequence[FileDigest]) -> None:
        """Keep the files that have arrived whole, and remove the rest and the list."""
        script = (
            f"cd {self._root}/incoming && mkdir {self._area}.kept || exit\n"
            "while read -r sha size; do\n"
            f'  [ "$(stat -c %s {self._area}/"$sha" 2>/dev/null)" != "$size" ] ||\n'
            f'    mv {self._area}/"$sha" {self._area}.kept/\n'
            f"done\nrmdir {self._area}.kept 2>/dev/null\nrm -rf {self._area}"
        )
        lines = "".join(f"{digest.sha256} {digest.size}\n" for digest in keep).encode()
        if not keep:
            script = self._remove_area
        self._device.shell(script, timeout_s=_CLEAN_TIMEOUT_S, stdin=lines, check=False)

    def _full(self, needed: int) -> DeviceFullError:
        free = None
        with contextlib.suppress(HarnessError):
            free = self._device.free_bytes(timeout_s=_CLEAN_TIMEOUT_S)
        return DeviceFullError(self._device.serial, self._device.work_root, needed, free)

    def _verify(self, script: str, contents: Sequence[FileDigest]) -> dict[str, str]:
        lines = "".join(f"{digest.sha256} {digest.size}\n" for digest in contents)
        limit_s = self._deadline.at_most(hashing_s(contents))
        try:
            result = self._device.shell(
                script, timeout_s=limit_s, stdin=lines.encode(), check=False
            )
        except DeviceTimeoutError as error:
            action = f"hashing {pluralize(len(contents), 'file')}"
            raise DeviceTimeoutError(error.serial, action, error.timeout_s) from None
        if "\nqnnfarm-verify ok=" not in f"\n{result.stdout}":
            if DISK_FULL in result.stderr:
                # How much it lacked for its lists is not known, and what is free now says little.
                raise DeviceFullError(self._device.serial, self._device.work_root, None, None)
            log = result.stderr.strip() or result.stdout
            raise DeviceCommandError(self._device.serial, "verify.sh", result.exit_status, log)
        matches = filter(None, map(_ANSWER.fullmatch, result.stdout.splitlines()))
        return {match[2]: match[1] for match in matches}

    def _shell(self, command: str, stdin: str | None = None) -> str:
        data = None if stdin is None else stdin.encode("utf-8", "surrogateescape")
        limit_s = self._deadline.at_most(STEP_S)
        return self._device.shell(command, timeout_s=limit_s, stdin=data).stdout

    def _script(self, name: str) -> str:
        return f"sh {shlex.quote(f'{self._scripts}/{name}')}"

    @property
    def _root(self) -> str:
        return shlex.quote(self._device.work_root)

    @property
    def _remove_area(self) -> str:
        return f"rm -rf {self._root}/incoming/{self._area}"
