"""Where the project keeps what it may throw away (cache) and what it must remember (state)."""

import os
from pathlib import Path

import platformdirs

from buildlib.paths import default_cache_root


def cache_dir() -> Path:
    """Folder of everything that can be built or computed again, which the builder shares."""
    return default_cache_root()


def state_dir() -> Path:
    """Folder of virtual devices and their records; `QNNFARM_STATE_DIR` overrides it."""
    override = os.environ.get("QNNFARM_STATE_DIR")
    return Path(override) if override else Path(platformdirs.user_state_dir("qnnfarm"))
