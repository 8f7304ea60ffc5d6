"""Folder of what the project must remember; `buildlib.paths` has that of what it can make again."""

import os
from pathlib import Path

import platformdirs


def state_dir() -> Path:
    """Return the folder of virtual devices and their records; `QNNFARM_STATE_DIR` overrides it."""
    override = os.environ.get("QNNFARM_STATE_DIR")
    return Path(override) if override else Path(platformdirs.user_state_dir("qnnfarm"))
