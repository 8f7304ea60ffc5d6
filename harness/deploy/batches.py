"""In which order and groups contents are pushed."""

from collections.abc import Iterable

from harness.deploy.hashing import FileDigest

BATCH_BYTES = 16 << 20


def batches(contents: Iterable[FileDigest], at_least: int = BATCH_BYTES) -> list[list[FileDigest]]:
    """Groups of at least `at_least` bytes each but for the last, the largest files first.

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
