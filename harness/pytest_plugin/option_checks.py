"""Checks of options by the modules that use them: devices, pools, runtimes and databases."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.errors import HarnessError
from harness.pool.config import load_config
from harness.pytest_plugin.leases import parse_devices
from harness.pytest_plugin.options import PluginSettings
from harness.results.store import ResultsStore
from harness.runtimes.bundles.bundle import pushed_files
from harness.runtimes.registry import check_runtime


def check_options(config: pytest.Config, settings: PluginSettings) -> None:
    """Check the options' values; a pool file of an ini file is read when a test needs it.

    Raises:
        pytest.UsageError: names the option that cannot be used.
    """
    with _refusing(f"--runtime {settings.runtime}: "):
        check_runtime(settings.runtime)
    with _refusing("--device: "):
        parse_devices(settings)
    if config.option.qnnfarm_pool is not None and settings.pool is not None:
        with _refusing("--pool: "):
            load_config(settings.pool)
    if config.option.qnnfarm_db and not hasattr(config, "workerinput"):
        with _refusing("--qnnfarm-db: "):
            ResultsStore.check(config.option.qnnfarm_db)
    with _refusing(""):  # it names the option
        pushed_files(settings.push)


@contextmanager
def _refusing(prefix: str) -> Iterator[None]:
    """Raise a usage error for a value that cannot be used, with the option before its reason."""
    try:
        yield
    except (HarnessError, ValueError) as error:
        raise pytest.UsageError(f"{prefix}{error}") from error
