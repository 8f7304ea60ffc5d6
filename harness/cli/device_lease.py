"""Leases of commands, so that no two measure each other on one device."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from buildlib.container.container import GenAIContainer
from buildlib.targets import parse_target
from harness.cli.arguments import WAIT_S, DeviceOptions, RunOptions
from harness.console import print_remark, progress, visible
from harness.deploy.deployment import Progress as OnProgress
from harness.devices.device import Device
from harness.devices.spec import DeviceSpec, find_type
from harness.errors import HarnessError, LeaseLostError, LeaseTimeoutError, one_line
from harness.pool.failure_policy import Work, work_id
from harness.pool.lease import Lease
from harness.pool.pool import Pool, find_config, host_devices, trusted_users
from harness.pool.requirement import Requirement
from harness.pool.states import MemberState
from harness.runtimes.base import Model
from harness.runtimes.bundles.bundle import pushed_files
from harness.workloads.session import DeviceSource, Session, SessionOptions

_AT_ONCE_S = 1.0


@contextmanager
def lease_device(
    name: str | None, *, wait_s: float, purpose: str, work: Work | None = None
) -> Iterator[Device]:
    """Lease the device of a name for this process.

    Args:
        name: as `DeviceSpec.parse` takes it; `None` is `$ANDROID_SERIAL`, or the only one.
        wait_s: how long to wait if others hold it. A device that is out for another reason is
            not waited for.
        work: that is done on it, see `Lease.report`.
    """
    spec = DeviceSpec.parse(name) if name else None
    with host_devices() as devices, Pool.of([devices.resolve(spec)], devices=devices) as pool:
        waiting = _Waiting(pool)
        try:
            lease = pool.acquire(
                Requirement(),
                timeout_s=wait_s,
                purpose=purpose,
                cancelled=waiting.is_vain,
                on_wait=partial(_tell_wait, wait_s),
            )
        except LeaseTimeoutError as error:
            if not waiting.given_up:
                raise
            reason = f"{error.reason}; --wait is for devices that others hold"
            raise LeaseTimeoutError(error.requirement, error.timeout_s, reason) from None
        with _reporting(lease, work) as device:
            yield device


@contextmanager
def _reporting(lease: Lease, work: Work | None) -> Iterator[Device]:
    """Hold a lease for a block, and report to the pool how the work in it ended."""
    with lease:
        try:
            yield lease.device
        except LeaseLostError:
            raise
        except HarnessError as error:
            if work is not None and (blame := lease.report(error, work)):
                print_remark(f"the container is at fault: {blame}")
            raise
        if work is not None:
            with suppress(HarnessError):
                lease.report_success(work)


class _Waiting:
    """Looks once, when a command has to wait for its device, whether others hold it.

    Attributes:
        given_up: whether the device is out for another reason.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._since = time.monotonic()
        self._is_held = False
        self.given_up = False

    def is_vain(self) -> bool:
        """Return whether to give up."""
        if not self._is_held and time.monotonic() - self._since >= _AT_ONCE_S:
            (member,) = self._pool.members()
            ready = member.state is MemberState.READY
            self.given_up = not ready and member.state is not MemberState.LEASED
            self._is_held = not ready or bool(member.reserved)  # else it is about to be granted
        return self.given_up


def _tell_wait(wait_s: float, reason: str) -> None:
    print_remark(f"waiting for a device, {wait_s:g} s at most: {one_line(reason)}")


@contextmanager
def device_source(
    names: Sequence[str] | None,
    pool: Path | None,
    *,
    command: str,
    wait_s: float,
    purpose: Callable[[int], str] = lambda number: f"session {number + 1}",
) -> Iterator[DeviceSource]:
    """Open a source of devices for sessions, each of which leases its own.

    Of a pool it is one with the SoC of the session's container, if none is named.

    They come from a pool: that of `pool`, of `$QNNFARM_POOL`, or of `./pool.yaml`. A name that is
    no member of a pool which nobody asked for, and `$ANDROID_SERIAL`, name a device directly; so
    does everything where there is no pool.

    Args:
        names: devices, or members of the pool, that take turns.
        pool: a pool's file.
        command: that runs on the devices.
        wait_s: how long to wait for each lease.
        purpose: of the lease of a session, by its number.
    """
    if pool is None and not names and os.environ.get("ANDROID_SERIAL"):
        names = [os.environ["ANDROID_SERIAL"]]

    def named(number: int) -> str | None:
        return names[number % len(names)] if names else None

    def work(container: str) -> Work | None:
        return Work(work_id(container, command), command, time.time()) if container else None

    def direct(number: int, _soc: str, container: str = "") -> AbstractContextManager[Device]:
        return lease_device(
            named(number), wait_s=wait_s, purpose=purpose(number), work=work(container)
        )

    path, _ = find_config(pool)
    if path is None:
        yield direct
        return
    with Pool.open(pool, on_progress=print_remark) as opened:
        members = _member_names(opened)

        @contextmanager
        def leased(number: int, soc: str, container: str = "") -> Iterator[Device]:
            name = named(number)
            if name is not None and name not in members and pool is None:
                with direct(number, soc, container) as device:
                    yield device
                return
            member = None if name is None else members.get(name, name)
            requirement = Requirement(name=member) if member else Requirement(soc=soc or None)
            told, why = partial(_tell_wait, wait_s), purpose(number)
            lease = opened.acquire(requirement, timeout_s=wait_s, purpose=why, on_wait=told)
            with _reporting(lease, work(container)) as device:
                yield device

        yield leased


def _member_names(pool: Pool) -> dict[str, str]:
    """Return the names of a pool's members by everything that `--device` may call them."""
    members = pool.members()
    return {
        **{str(member.spec): member.name for member in members},
        **{member.spec.identifier: member.name for member in members if member.spec.identifier},
        **{member.name: member.name for member in members},
    }


@contextmanager
def deploy_progress(device: str) -> Iterator[OnProgress]:
    """Show one deployment to `device`; gives its `on_progress`.

    The bar appears with the first pushed byte, says when the device hashes, and goes away at the
    end. There is none where stderr is not a terminal.
    """
    device = visible(device)
    with progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ) as bar:
        task = bar.add_task(f"push to {device}", total=None, visible=False)

        def update(sent: int, total: int) -> None:
            what = "push to" if sent < total else "hashing on"
            bar.update(
                task, completed=sent, total=total, description=f"{what} {device}", visible=True
            )

        yield update


def tell_running(seconds: float, words: str) -> None:
    """Say that a command on a device still runs, and how far it is."""
    print_remark(f"still running, {seconds:.0f} s" + (f": {words}" if words else ""))


@contextmanager
def open_session(model: Model, options: DeviceOptions, *, command: str) -> Iterator[Session]:
    """Lease a device for a model, and open a session that leaves nothing on it.

    Args:
        command: see `device_source`.
    """
    settings = SessionOptions(
        shown=deploy_progress, runner_timeout_s=options.timeout, on_running=tell_running
    )
    if isinstance(options, RunOptions):
        settings = replace(
            settings,
            log_level=options.log_level,
            trace=options.trace is not None,
            push=pushed_files(options.push or ()),
        )
    info = model.info
    purpose = f"running {info.model}"
    names = [options.device] if options.device else None
    with (
        device_source(
            names, options.pool, command=command, wait_s=options.wait, purpose=lambda _: purpose
        ) as source,
        source(0, info.soc, info.sha256) as device,
        Session(device, model, settings) as session,
    ):
        yield session


@contextmanager
def virtual_device(container: GenAIContainer) -> Iterator[Device]:
    """Lease a virtual device of the container's SoC that runs for the block."""
    from harness.devices.adb.server import ensure_server, stop_if_ours

    soc = parse_target(container.metadata.target.name).soc.name
    server = ensure_server(trusted_users=trusted_users())
    try:
        with (
            find_type("virtual").running(
                f"rehearse-{soc.lower()}", soc, server, print_remark
            ) as serial,
            lease_device(serial, wait_s=WAIT_S, purpose="a rehearsal") as device,
        ):
            yield device
    finally:
        stop_if_ours(server)
