"""Where the project keeps what it can make again."""

import os
from pathlib import Path

import platformdirs


def default_cache_root() -> Path:
    """Folder of everything that can be built again; `QNNFARM_CACHE_DIR` overrides it."""
    override = os.environ.get("QNNFARM_CACHE_DIR")
    return Path(override) if override else Path(platformdirs.user_cache_dir("qnnfarm"))
