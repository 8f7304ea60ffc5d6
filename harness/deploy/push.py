"""Push pipeline: the next batch is pushed while the device hashes the last one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from harness.clock import Deadline
from harness.deploy.digests import FileDigest
from harness.devices.base import PushItem
from harness.devices.device import Device

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


Progress = Callable[[int, int], None]
"""Called with the bytes pushed so far and the bytes to push."""

Shown = Callable[[str], AbstractContextManager[Progress]]
"""Shows a deployment to the device of that serial, while the block lasts."""

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
