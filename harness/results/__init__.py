"""Measurements: records, storage, statistics and comparison. A leaf of the harness.

`harness.results.frames` reads a database as pandas frames.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.results.data_frames import Frames, frames

__all__ = ["Frames", "frames"]


def __getattr__(name: str) -> object:
    """Load pandas only when frames are asked for."""
    if name in __all__:
        from harness.results import data_frames

        return getattr(data_frames, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
