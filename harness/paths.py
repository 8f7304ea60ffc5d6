"""Where the project keeps what it may throw away (cache) and what it must remember (state)."""

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Folder of everything that can be built again; `QNNFARM_CACHE_DIR` overrides it."""
    override = os.environ.get("QNNFARM_CACHE_DIR")
    return Path(override) if override else Path(platformdirs.user_cache_dir("qnnfarm"))


def state_dir() -> Path:
    """Folder of virtual devices and their records; `QNNFARM_STATE_DIR` overrides it."""
    override = os.environ.get("QNNFARM_STATE_DIR")
    return Path(override) if override else Path(platformdirs.user_state_dir("qnnfarm"))
