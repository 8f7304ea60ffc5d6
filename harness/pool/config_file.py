"""Reading a `pool.yaml`: what is wrong with it is said with its line and key."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from harness.devices.spec import DeviceSpec
from harness.errors import PoolConfigError, VirtualDeviceChangeError
from harness.pool.config import DeviceEntry, PoolConfig, default_name
from harness.pool.wording import reason, together
from harness.pool.yaml_tree import place_of, tree_of

_MOST_BYTES = 1 << 20
_WHOLE = "the pool"
_OF_TEXTS = {"exclude", "tags", "power_cycle", "steps"}


def _of_any(_: DeviceSpec) -> None:
    """No device is known."""


def load_config(path: Path, *, soc_of: Callable[[DeviceSpec], str | None] = _of_any) -> PoolConfig:
    """Read a pool's file.

    Args:
        soc_of: the SoC of a device that exists, if that is known.

    Raises:
        PoolConfigError: it cannot be read or used; names the line and the key.
    """
    where = str(path)
    try:
        with path.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise PoolConfigError(where, None, "", "it is longer than 1 MiB")
        text = content.decode("utf-8")
    except OSError as error:
        raise PoolConfigError(where, None, "", error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise PoolConfigError(where, None, "", f"it is no UTF-8: {error.reason}") from None
    return parse_config(text, where, soc_of=soc_of)


def parse_config(
    text: str, where: str = "pool.yaml", *, soc_of: Callable[[DeviceSpec], str | None] = _of_any
) -> PoolConfig:
    """Read the text of a pool's file; see `load_config`.

    Raises:
        PoolConfigError: it cannot be used.
    """
    root = tree_of(text, where)
    try:
        value: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise PoolConfigError(where, None, "", str(error)) from None
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise PoolConfigError(where, 1, "", "it is no mapping of keys: see docs/pool.md")
    try:
        config = PoolConfig.model_validate(value)
    except ValidationError as error:
        raise _not_valid(error, root, where) from None
    if twice := _given_twice(config.devices):
        number, said = twice
        raise PoolConfigError(where, *place_of(root, ("devices", number)), said)
    for number, entry in enumerate(config.devices):
        made_with = soc_of(entry.spec) if entry.soc and entry.spec else None
        if made_with is not None and made_with != entry.soc:
            other = VirtualDeviceChangeError(entry.identifier, "SoC", made_with, str(entry.soc))
            place = place_of(root, ("devices", number, "soc"))
            raise PoolConfigError(where, *place, str(other))
    return config


def _not_valid(error: ValidationError, root: yaml.Node | None, where: str) -> PoolConfigError:
    """The first complaint with its place, and of the others what a line holds."""
    places = [
        (*place_of(root, found["loc"]), reason(found, _OF_TEXTS))
        for found in error.errors(include_url=False, include_input=False)
    ]
    line, key, first = places[0]
    others = [
        f"{f'line {at}, ' if at else ''}{path or _WHOLE}: {said}"
        for at, path, said in dict.fromkeys(places)
        if (at, path, said) != places[0]
    ]
    return PoolConfigError(where, line, key or _WHOLE, together(first, others))


def _given_twice(entries: Sequence[DeviceEntry]) -> tuple[int, str] | None:
    """The first entry whose name or device another before it has, and which of the two."""
    names: set[str] = set()
    specs: set[DeviceSpec] = set()
    for number, entry in enumerate(entries):
        if (spec := entry.spec) is None:
            continue
        name = entry.name or default_name(spec)
        if spec in specs:
            return number, f"{spec} is given twice"
        if name in names:
            return number, f"two devices are named {name}: give one another `name`"
        names.add(name)
        specs.add(spec)
    return None
