"""The leases of one pytest process: at most one at a time, kept while the next test needs the same.

A process that waits for devices holds none, so two of them can never wait for each other.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.pytest_plugin.marker import Wish
from harness.pytest_plugin.options import Settings

if TYPE_CHECKING:
    from buildlib.container.manifest import TargetRecord
    from harness.devices.base import DeviceProperties
    from harness.errors import HarnessError
    from harness.pool.lease import Lease
    from harness.pool.pool import Pool
    from harness.pool.requirement import Requirement


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """Tests with equal keys may share a lease.

    Attributes:
        container: folder of the container that the devices must be able to run.
        session: which of the `--repeat` sessions; each has a lease of its own.
    """

    wish: Wish
    container: Path | None
    session: int


@dataclass
class Held:
    """A lease, and what its devices said of themselves when it began."""

    key: LeaseKey
    requirement: "Requirement"
    lease: "Lease"
    lost: bool = False
    _properties: "tuple[DeviceProperties, ...]" = field(default=())

    def properties(self) -> "tuple[DeviceProperties, ...]":
        """Of each device; asked for once a lease.

        Raises:
            DeviceError: a device does not answer.
        """
        if not self._properties:
            self._properties = tuple(device.properties() for device in self.lease.devices)
        return self._properties


class LeaseKeeper:
    """Leases devices for the tests of this process.

    Owns the pool, which is opened when a test first needs it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = contextlib.ExitStack()
        self._held: Held | None = None

    @functools.cached_property
    def pool(self) -> "Pool":
        """The pool that was asked for.

        Raises:
            HarnessError: its configuration cannot be used, or nobody knows a device of it.
        """
        from harness.pool.pool import Pool
        from harness.pytest_plugin.known import require_known

        settings = self._settings
        named = settings.device_specs()
        require_known(named)
        pool = Pool.of(named) if named else Pool.open(settings.pool)
        return self._stack.enter_context(pool)

    def borrow(
        self,
        key: LeaseKey,
        requirement: "Requirement",
        purpose: str,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> Held:
        """The lease of that key: the one that is held if it is still ours, else a new one.

        Args:
            while_waiting: called several times a second while others hold them.

        Raises:
            RequirementError: no device of the pool can ever meet the requirement.
            LeaseTimeoutError: others held them for longer than the user wants to wait.
        """
        if self._held is not None and not self._is_good(self._held, key):
            self.settle(None)
        if self._held is None:

            def never() -> bool:
                while_waiting()
                return False

            lease = self.pool.acquire(
                requirement,
                timeout_s=self._settings.lease_timeout_s,
                purpose=purpose,
                cancelled=never,
            )
            self._held = Held(key, requirement, lease)
        return self._held

    def lose(self, held: Held, failure: "HarnessError") -> None:
        """Hand the pool the evidence against a device; the next test gets another lease."""
        held.lost = True
        self.accuse(held, failure)

    @staticmethod
    def accuse(held: Held, failure: "HarnessError") -> None:
        """Hand the pool what a device did wrong; the pool weighs it."""
        from harness.errors import HarnessError

        with contextlib.suppress(HarnessError):
            held.lease.report(failure)

    def settle(self, following: LeaseKey | None) -> None:
        """Give the lease back unless the test that follows needs it."""
        from harness.errors import HarnessError

        held = self._held
        if held is None or (held.key == following and not held.lost):
            return
        self._held = None
        with contextlib.suppress(HarnessError):  # what is no longer ours is given back already
            held.lease.release()

    def close(self) -> None:
        """Give everything back."""
        self.settle(None)
        self._stack.close()

    @staticmethod
    def _is_good(held: Held, key: LeaseKey) -> bool:
        from harness.errors import HarnessError

        if held.key != key or held.lost:
            return False
        try:
            held.lease.check()
        except HarnessError:
            return False
        return True


def purpose(name: str) -> str:
    """What others see as the reason of a lease."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    return f"pytest {worker} {name}".replace("  ", " ")


def require(wish: Wish, target: "TargetRecord | None", kinds: frozenset[str]) -> "Requirement":
    """What to ask the pool for, a container to be run included.

    Args:
        wish: the marker's.
        target: what the container was compiled for.
        kinds: types of the pool's devices.
    """
    requirement = wish.requirement()
    if target is None or wish.name is not None:
        return requirement
    from dataclasses import replace

    from harness.devices.types import device_types

    if wish.hexagon is None and kinds != {"local"}:
        requirement = replace(requirement, hexagon=target.dsp_arch)
    emulated = {kind for kind in kinds if device_types()[kind].emulated}
    if wish.type is None and emulated and len(kinds) > 1:
        requirement = replace(requirement, type=_type(kinds, emulator=target.emulator))
    return requirement


def _type(kinds: frozenset[str], *, emulator: bool) -> str | None:
    from harness.devices.types import device_types

    fitting = (name for name, kind in device_types().items() if kind.emulated is emulator)
    return next((name for name in fitting if name in kinds), None)
