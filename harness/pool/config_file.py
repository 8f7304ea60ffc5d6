"""Reading a `pool.yaml`: what is wrong with it is said with its line and key."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from harness.devices.spec import DeviceSpec
from harness.errors import PoolConfigError, VirtualDeviceChangeError
from harness.pool.config import DeviceEntry, PoolConfig, default_name
from harness.yaml_files import YamlFile, read_yaml


def _of_any(_: DeviceSpec) -> None:
    """No device is known."""


def load_config(path: Path, *, soc_of: Callable[[DeviceSpec], str | None] = _of_any) -> PoolConfig:
    """Read a pool's file.

    Args:
        soc_of: the SoC of a device that exists, if that is known.

    Raises:
        PoolConfigError: it cannot be read or used; names the line and the key.
    """
    content = read_yaml(path, partial(PoolConfigError, str(path)))
    return parse_config(content, str(path), soc_of=soc_of)


def parse_config(
    text: str, where: str = "pool.yaml", *, soc_of: Callable[[DeviceSpec], str | None] = _of_any
) -> PoolConfig:
    """Read the text of a pool's file; see `load_config`.

    Raises:
        PoolConfigError: it cannot be used.
    """
    file = YamlFile(text, PoolConfig, partial(PoolConfigError, where))
    config = file.content
    if twice := _given_twice(config.devices):
        number, said = twice
        raise file.error(("devices", number), said)
    for number, entry in enumerate(config.devices):
        made_with = soc_of(entry.spec) if entry.soc and entry.spec else None
        if made_with is not None and made_with != entry.soc:
            other = VirtualDeviceChangeError(entry.identifier, "SoC", made_with, str(entry.soc))
            raise file.error(("devices", number, "soc"), str(other))
    return config


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
