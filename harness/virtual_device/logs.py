"""The log of a device's process: standard error, a file that must not fill the disk."""

import logging
import os
import stat
import sys

_FORMAT = "%(asctime)s %(name)s: %(message)s"
_MAX_BYTES = 4 * 1024 * 1024
_KEPT_BYTES = _MAX_BYTES // 2


def set_up_logging(level: int) -> None:
    """Log to standard error from now on, and keep the last megabytes of it alone."""
    handler = BoundedHandler(sys.stderr)
    logging.basicConfig(level=level, format=_FORMAT, handlers=[handler])


class BoundedHandler(logging.StreamHandler):  # type: ignore[type-arg]  # no parameter at run time
    """Drops the older half of a file that is open for appending once it is too large."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        super().emit(record)
        try:
            _shorten(self.stream.fileno())
        except OSError:
            self.handleError(record)


def _shorten(descriptor: int) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size <= _MAX_BYTES:
        return
    # It was opened for writing, and where the device lives it may have no name any more.
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # noqa: PTH123 - no path
        file.seek(-_KEPT_BYTES, os.SEEK_END)
        kept = file.read()
    os.ftruncate(descriptor, 0)
    os.write(descriptor, kept[kept.find(b"\n") + 1 :])
