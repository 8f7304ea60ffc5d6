"""Paths: the cache root, and paths as users write them."""

import os
from pathlib import Path

import platformdirs


def default_cache_root() -> Path:
    """Return the cache folder; `QNNFARM_CACHE_DIR` overrides it."""
    override = os.environ.get("QNNFARM_CACHE_DIR")
    return user_path(override) if override else Path(platformdirs.user_cache_dir("qnnfarm"))


def user_path(path: str | os.PathLike[str]) -> Path:
    """Expand `~` in a user's path, if there is a home folder of that name.

    Shells leave it in `--out=~/folder`, in files and in quotes.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def plain_path(path: str | os.PathLike[str]) -> Path:
    """Return a path as an absolute one without `..`."""
    return Path(os.path.normpath(Path(path).absolute()))


def absolute_user_path(path: str | os.PathLike[str]) -> Path:
    """Expand and make absolute, for files that are opened later from another working folder."""
    return user_path(path).absolute()
