"""The stage cache of the Gen AI Builder, in the documented layout.

    <cache_root>/<model>/<operation>_<first 32 hex of the hash>/
        builder_cache_info.json     operation, source, config, hash, created_at
        .files.json                 what else the hash is over; size and hash of every file
        ...                         what the stage made

A stage's hash is the SHA-256 of its operation, its options, the versions of what makes it, and the
hashes of what it reads, so hashes form a chain: changing an option changes the hash of that stage
and of all after it, and of nothing else.

Layout and the five fields: "Gen AI Builder Overview", docs.qualcomm.com 80-87189-2.
"""

import importlib
from typing import TYPE_CHECKING

from buildlib.cache.layout import SIDECAR, Operation
from buildlib.paths import default_cache_root

if TYPE_CHECKING:
    from buildlib.cache.key import StageKey
    from buildlib.cache.store import CacheEntry, StageCache

__all__ = ["SIDECAR", "CacheEntry", "Operation", "StageCache", "StageKey", "default_cache_root"]


def __getattr__(name: str) -> object:
    """Who only asks where the cache is needs nothing of what is in it."""
    homes = {"StageKey": "key", "CacheEntry": "store", "StageCache": "store"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
