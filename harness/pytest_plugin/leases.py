"""Leases of one pytest process: at most one at a time, kept while the next test needs the same.

A process that waits for devices holds none, so two processes never wait for each other.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from buildlib.targets import Target
from harness.console import visible
from harness.devices.spec import DeviceSpec, device_types
from harness.errors import HarnessError, one_line
from harness.pool.lease import Lease
from harness.pool.pool import Pool, host_devices
from harness.pool.requirement import Requirement
from harness.pytest_plugin.items import PATH_FIXTURE, SESSION_FIXTURE, uses_device
from harness.pytest_plugin.marker import MarkerError, read_marker
from harness.pytest_plugin.options import PluginSettings
from harness.pytest_plugin.terminal import WAITING


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """Key of a lease; tests with equal keys may share one.

    Attributes:
        requirement: of the test's markers.
        container: folder of the container that the devices must be able to run.
        session: which of the `--repeat` sessions; each has a lease of its own.
    """

    requirement: Requirement
    container: Path | None
    session: int


class LeaseManager:
    """Plugin that leases devices for the tests of this process.

    Owns the pool, which is opened when a test first needs it.
    """

    def __init__(self, settings: PluginSettings) -> None:
        self._settings = settings
        self._stack = contextlib.ExitStack()
        self._held: tuple[LeaseKey, Lease] | None = None

    @functools.cached_property
    def pool(self) -> Pool:
        """Open the pool of `--device` or `--pool`; a `--device` has to be there."""
        specs = parse_devices(self._settings)
        if not specs:
            return self._stack.enter_context(Pool.open(self._settings.pool))
        with contextlib.ExitStack() as stack:
            devices = stack.enter_context(host_devices())
            there = [devices.resolve(spec) for spec in specs]
            pool = stack.enter_context(Pool.of(there, devices=devices))
            self._stack.push(stack.pop_all())
        return pool

    def acquire(
        self,
        key: LeaseKey,
        requirement: Requirement,
        purpose: str,
        on_wait: Callable[[str], None],
    ) -> Lease:
        """Return the lease of a key: the held one while it can be used, else a new one.

        Args:
            on_wait: see `Pool.acquire`.

        Raises:
            RequirementError: no device of the pool can meet the requirement.
            LeaseTimeoutError: others held the devices for longer than the user wants to wait.
        """
        if not self._keeps(key):
            self._release()
        if self._held is None:
            timeout_s = self._settings.lease_timeout_s
            lease = self.pool.acquire(
                requirement, timeout_s=timeout_s, purpose=purpose, on_wait=on_wait
            )
            self._held = key, lease
        return self._held[1]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> Generator[None]:
        """Release the lease unless the next test needs the same."""
        try:
            return (yield)
        finally:
            if not self._keeps(_next_key(nextitem)):
                self._release()

    def close(self) -> None:
        """Release the lease and close the pool."""
        self._release()
        self._stack.close()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(HarnessError):  # a lost lease is released already
                held[1].release()

    def _keeps(self, key: LeaseKey | None) -> bool:
        """Return whether the lease, if any is held, serves tests of that key."""
        return self._held is not None and self._held[0] == key and self._held[1].is_usable


def parse_devices(settings: PluginSettings) -> tuple[DeviceSpec, ...]:
    """Parse the devices of the settings."""
    return tuple(map(DeviceSpec.parse, settings.devices))


def key_of(item: pytest.Item, container: Path | None = None) -> LeaseKey:
    """Return the lease key of a test.

    Args:
        container: its folder; by default the one that the test is parametrized with.
    """
    params = getattr(getattr(item, "callspec", None), "params", {})
    if container is None:
        container = params.get(PATH_FIXTURE)
    return LeaseKey(read_marker(item), container, params.get(SESSION_FIXTURE, 0))


def _next_key(item: pytest.Item | None) -> LeaseKey | None:
    """Return the lease key of the next test, if it uses devices."""
    with contextlib.suppress(MarkerError):
        return key_of(item) if item is not None and uses_device(item) else None
    return None


def purpose_of(name: str) -> str:
    """Return the purpose of a test's lease, as `qnnfarm pool show` shows it."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    return f"pytest {worker} {name}".replace("  ", " ")


def with_target(
    requirement: Requirement, target: Target | None, kinds: frozenset[str]
) -> Requirement:
    """Add to a test's requirement that its container runs there.

    Args:
        target: of the container.
        kinds: types of the pool's devices.
    """
    if target is None or requirement.name is not None:
        return requirement
    if requirement.hexagon is None and kinds != {"local"}:
        requirement = replace(requirement, hexagon=target.soc.dsp_arch)
    emulated = {name: kind.emulated for name, kind in device_types().items() if name in kinds}
    if requirement.type is None and any(emulated.values()) and len(kinds) > 1:
        suitable = (name for name, one in emulated.items() if one is target.emulator)
        requirement = replace(requirement, type=next(suitable, None))
    return requirement


def tell_wait(item: pytest.Item, requirement: Requirement, reason: str) -> None:
    """Say which test waits for which devices, and why none is available.

    The notice travels on the report of a passed setup, which no reporter shows or counts.
    """
    report = pytest.TestReport(
        item.nodeid, item.location, {}, outcome="passed", longrepr=None, when="setup"
    )
    text = f"qnnfarm: {item.nodeid} waits for {one_line(str(requirement))}: {reason}"
    setattr(report, WAITING, visible(text))
    item.ihook.pytest_runtest_logreport(report=report)
