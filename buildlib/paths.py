"""Where the project keeps what it can make again."""

import os
from pathlib import Path

import platformdirs


def default_cache_root() -> Path:
    """Folder of everything that can be built again; `QNNFARM_CACHE_DIR` overrides it."""
    override = os.environ.get("QNNFARM_CACHE_DIR")
    return user_path(override) if override else Path(platformdirs.user_cache_dir("qnnfarm"))


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path as a user writes it: `~` is a home folder, if there is one of that name.

    Shells leave it in `--out=~/folder`, in files and in quotes.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def absolute_user_path(path: str | os.PathLike[str]) -> Path:
    """As `user_path`, for what is opened later, perhaps from another working folder."""
    return user_path(path).absolute()
