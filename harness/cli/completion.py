"""Completion of arguments by Tab, after `qnnfarm --install-completion`.

Nothing is started and nobody waits: devices are those that a running adb server has, those that
this host has on record, as virtual ones, and members of the pool. Where nothing fits, the shell
completes names of files.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from buildlib.targets import catalog
from harness.devices.spec import device_types
from harness.errors import HarnessError

_BEFORE = "_QNNFARM_COMPLETE_BEFORE"
"""Variable of what stands before the last colon of the word at the cursor."""
_LEVELS = ("*/metadata.json", "*/*/metadata.json", "*/*/*/metadata.json")

Offers = Iterable[tuple[str, str]]
"""Values and what they are."""


def join_bash_words() -> None:
    """Undo that bash takes `SM8750:emulator` for three words, of which it completes the last."""
    if os.environ.get("_QNNFARM_COMPLETE") == "complete_bash":
        words = os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]
        *words, last = re.sub(r"\n?:\n?", ":", "\n".join(words)).split("\n")
        before, colon, last = last.rpartition(":")
        new = {"COMP_WORDS": "\n".join([*words, last]), "COMP_CWORD": str(len(words))}
        os.environ.update(new | {_BEFORE: before + colon})


def offering(offers: Callable[[], Offers]) -> Callable[[str], list[tuple[str, str]]]:
    """Make a completion of what it offers when it is asked."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        before = os.environ.get(_BEFORE, "")
        fitting = [offer for offer in offers() if offer[0].startswith(before + incomplete)]
        return [(value.removeprefix(before), what) for value, what in fitting]

    return complete


def _socs() -> Offers:
    return [(soc.name, soc.marketing_name) for soc in catalog()]


def _targets() -> Iterator[tuple[str, str]]:
    for name, marketing in _socs():
        yield name, marketing
        yield f"{name}:emulator", f"HTP emulator of {marketing}"


def _recipes() -> Offers:
    from buildlib.quantize.options import RECIPES

    return [(name, "") for name in RECIPES]


def _metrics() -> Offers:
    from harness.results.metrics import METRICS

    return [(key, metric.name) for key, metric in METRICS.items()]


def _containers() -> Offers:
    found = (path for level in _LEVELS for path in Path().glob(level))
    return [(str(path.parent), "container") for path in sorted(found)]


def _devices() -> Iterator[tuple[str, str]]:
    from harness.devices.adb.server import resolve_server
    from harness.pool.pool import find_config, trusted_users

    yield "local", "this host"
    for kind in device_types().values():
        yield from ((str(one), kind.preview(one).obstacle or "running") for one in kind.on_record())
    with suppress(HarnessError):
        entries = find_config(None)[1].devices
        yield from ((entry.name, "of the pool") for entry in entries if entry.name)
    with suppress(HarnessError):
        seen = resolve_server(trusted_users=trusted_users()).devices()
        yield from ((device.serial, device.state) for device in seen)


complete_socs, complete_targets = offering(_socs), offering(_targets)
complete_recipes, complete_metrics = offering(_recipes), offering(_metrics)
complete_containers, complete_devices = offering(_containers), offering(_devices)
