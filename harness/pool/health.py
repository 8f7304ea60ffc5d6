"""Health of a pool's devices as plain records, for reports, which know no pool."""

from datetime import UTC, datetime
from pathlib import Path

from harness.pool.history import HistoryEntry
from harness.pool.pool import Pool, find_config
from harness.results.device_health import DeviceEvent, DeviceHealth


def read_device_health(config: Path | None = None) -> tuple[DeviceHealth, ...]:
    """Read states and histories of the devices of a pool; no device is asked.

    Args:
        config: the pool's file; by default that of `$QNNFARM_POOL` or `./pool.yaml`. Without one,
            there is no pool to tell of.
    """
    path, _ = find_config(config)
    if path is None:
        return ()
    with Pool.open(path, probe=False) as pool:
        return tuple(
            DeviceHealth(
                name=status.name,
                serials=(str(status.spec), status.spec.identifier, status.spec.serial),
                state=status.state.value,
                reason=status.reason,
                since=datetime.fromtimestamp(status.since, UTC),
                failures=status.failures,
                events=tuple(map(_event, pool.history(status.name))),
            )
            for status in pool.overview()
        )


def _event(entry: HistoryEntry) -> DeviceEvent:
    return DeviceEvent(datetime.fromtimestamp(entry.at, UTC), entry.what, entry.text)
