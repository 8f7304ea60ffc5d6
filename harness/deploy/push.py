"""Push pipeline: the next batch is pushed while the device hashes the last one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

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


class VerifiedPush(AbstractContextManager["VerifiedPush"]):
    """Pushes on the caller's thread; hashing on the device is waited for on another.

    When the block is left by an error, a hashing under way is not waited for: it does no harm.
    """

    def __init__(self, device: Device, deadline: Deadline, verify: Verify) -> None:
        self._device = device
        self._deadline = deadline
        self._verify = verify
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._verified: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._worker.shutdown(wait=error is None, cancel_futures=error is not None)

    def push(
        self, contents: Mapping[FileDigest, Path], folder: str, on_progress: Progress | None
    ) -> None:
        """Bring all of `contents` to `folder` on the device under their hashes, and verify them.

        Raises:
            DeploymentCorruptError: one arrived as something else; what follows is not pushed.
            HarnessError: see `Device.push_many`.
        """
        total = sum(digest.size for digest in contents)
        sent = 0

        def progress(count: int) -> None:
            nonlocal sent
            sent += count
            self._raise_failures()
            if on_progress:
                on_progress(sent, total)

        for batch in batches(contents):
            items = [PushItem(contents[d], f"{folder}/{d.sha256}") for d in batch]
            self._device.push_many(
                items, timeout_s=self._deadline.remaining(), on_progress=progress
            )
            self._verified.append(self._worker.submit(self._verify, batch))
        for verified in self._verified:
            verified.result()

    def _raise_failures(self) -> None:
        for verified in self._verified:
            if verified.done():
                verified.result()
