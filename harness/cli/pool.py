"""`qnnfarm pool`: shows and administers the devices of a pool."""

import dataclasses
import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from buildlib.sizes import age_text
from harness.cli.arguments import WAIT_S, Json, Wait
from harness.cli.completion import complete_socs
from harness.clock import SystemClock
from harness.console import Row, answers, print_json, print_remark, print_rows
from harness.devices.adb.client import AdbServer
from harness.devices.adb.server import find_adb, identify_adb, server_address
from harness.devices.adb.transport import AdbTransport
from harness.devices.spec import DeviceSpec, device_types
from harness.errors import (
    BAD,
    DeviceLostError,
    LeaseLostError,
    NotificationError,
    WrongUseError,
    one_line,
)
from harness.pool.config import ReceiverConfig
from harness.pool.database import Database
from harness.pool.lease import Lease
from harness.pool.ledger import Ledger
from harness.pool.notifications import Notification, send
from harness.pool.owner import this_process
from harness.pool.pool import Pool, find_config, find_ledger
from harness.pool.requirement import MemberStatus, Requirement

app = typer.Typer(
    help="The devices of a pool: who holds them, and in what state they are.",
    no_args_is_help=True,
)

PoolFile = Annotated[
    Path | None,
    typer.Option(
        "--pool", help="pool.yaml; by default $QNNFARM_POOL, ./pool.yaml, or all adb devices."
    ),
]
Name = Annotated[str, typer.Argument(help="Name of the device in the pool.")]

_HEADINGS = ("name", "state", "since", "SoC", "against it", "token", "tags", "holder or reason")
_MOST_FAILURES = 3
_WATCH_S = 1.0
_LOOK_S = 1.0
"""How often `lease` looks whether its lease still holds."""
_TEST = "a test of qnnfarm's notifications"
_LONGEST_FAILURE = 120
_DURATION = re.compile(r"(?:([0-9]{1,2})d)?(?:([0-9]{1,4})h)?(?:([0-9]{1,5})m)?")
_LONGEST_S = 31 * 86_400
_COLOURS = {
    "ready": "green",
    "leased": "cyan",
    "draining": "yellow",
    "recovering": "yellow",
    "probation": "yellow",
    "quarantined": "red",
    "absent": "red",
}


@app.command("show")
def show(
    pool: PoolFile = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again each second, with the queue, until Ctrl-C.")
    ] = False,
    json: Json = False,
) -> None:
    """Show every device: state and reason, holder, failures that count against it.

    No device is asked, started or repaired: see `probe`.

    Example: qnnfarm pool show --watch
    """
    with _opened(pool) as open_pool:
        while watch and not json:
            members, tickets = open_pool.overview(), open_pool.waiting()
            answers().clear()
            _print(members, json=False)
            for one in tickets:
                age = age_text(time.time() - one.since)
                print_remark(f"{one.holder} waits for {age}: {one.reason}")
            time.sleep(_WATCH_S)
        _print(open_pool.overview(), json=json)


@app.command("probe")
def probe(pool: PoolFile = None, json: Json = False) -> None:
    """Probe every unleased device, then show all.

    Example: qnnfarm pool probe
    """
    with _opened(pool, probe=True) as open_pool:
        _print(open_pool.probe(), json=json)


@app.command("history")
def history(
    name: Name,
    pool: PoolFile = None,
    days: Annotated[
        float | None, typer.Option(min=0, help="Only the last so many days; by default all.")
    ] = None,
    json: Json = False,
) -> None:
    """Show a device's history, oldest first: states, failures and their weights, recovery steps.

    The newest 500 of each kind are kept.

    Example: qnnfarm pool history NAME --days 7
    """
    since = 0.0 if days is None else time.time() - days * 86_400
    with _opened(pool) as open_pool:
        entries = open_pool.history(name, since=since)
    if json:
        print_json([dataclasses.asdict(entry) for entry in entries])
        return
    if not entries:
        answers().print("nothing yet")
        return
    rows = []
    for entry in entries:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at))
        rows.append([when, entry.what, entry.text])
    print_rows(("when", "what", ""), rows)


@app.command("release")
def release(
    name: Name,
    pool: PoolFile = None,
    token: Annotated[
        int | None, typer.Option(help="Only if the lease still has this token (see `show`).")
    ] = None,
) -> None:
    """Release a device's lease; its holder's next call on it fails.

    Example: qnnfarm pool release NAME
    """
    with _opened(pool) as open_pool:
        is_free = open_pool.admin.release(name, token=token)
        print_remark(
            f"released {name}" if is_free else f"{name} was not held, or not by that lease"
        )


@app.command("lease", context_settings={"allow_interspersed_args": False})
def lease(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Command of this host, after `--`; by default a shell on the device."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The device of that name.")] = None,
    soc: Annotated[
        str | None, typer.Option(help="A device with that SoC.", autocompletion=complete_socs)
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A device with that tag.")] = None,
    pool: PoolFile = None,
    wait: Wait = WAIT_S,
) -> None:
    """Hold a device while a command runs on this host, and exit as the command does.

    The command finds the device in ANDROID_SERIAL and ADB_SERVER_SOCKET, as `adb` does, and its
    name in QNNFARM_DEVICE. It is ended if the lease is lost: `pool release` takes the device back.

    Example: qnnfarm pool lease --soc SM8750 -- adb logcat -d
    """
    requirement = Requirement(name=name, soc=soc, tags=frozenset(tag or ()))
    purpose = " ".join(command or ["a shell"])
    with (
        _opened(pool, probe=True) as open_pool,
        open_pool.acquire(requirement, timeout_s=wait, purpose=purpose) as grant,
    ):
        member = next(m for m in open_pool.members() if m.name == grant.device.member)
        user = this_process().user
        if other := next((r for r in member.reservations if r.user != user), None):
            print_remark(f"{member.name} is {other.describe(time.time())}: the lease ends then")
        transport = grant.device.runner.transport
        adb = transport if isinstance(transport, AdbTransport) else None
        serial = device_types()[member.spec.type].preview(member.spec).adb_serial
        environment = {"QNNFARM_DEVICE": member.name}
        if serial:
            environment |= {"ANDROID_SERIAL": serial, "ADB_SERVER_SOCKET": server_address().spec}
        words = command or _shell_on(member.spec, adb.server if adb and serial else None)
        with adb.lifeline() if adb else nullcontext() as is_cut:
            status = _run_under(grant, words, environment)
            if is_cut and is_cut() and status == 0:
                lost = DeviceLostError(member.name, purpose, "its connection ended")
                if not command:
                    raise lost
                print_remark(str(lost))
    raise typer.Exit(status if status >= 0 else 128 - status)


def _shell_on(spec: DeviceSpec, server: AdbServer | None) -> list[str]:
    """Return the command of a shell on a device, which hangs on this host's adb server or none."""
    if server is not None:
        adb = identify_adb(find_adb())
        if adb.protocol != server.version:
            reason = (
                f"{adb.path} speaks adb 1.0.{adb.protocol} and would kill the server, which speaks "
                f"1.0.{server.version}: put the adb of the server on the PATH"
            )
            raise WrongUseError(reason)
        return [str(adb.path), "shell"]
    if spec.type == "android":
        return ["ssh", "-t", str(spec.host), "adb", "-s", spec.serial, "shell"]
    return [os.environ.get("SHELL", "sh")] if spec.type == "local" else ["ssh", spec.identifier]


def _run_under(held: Lease, words: list[str], environment: dict[str, str]) -> int:
    """Run a command of this host for as long as a lease holds; return its exit status."""
    try:
        process = subprocess.Popen(words, env={**os.environ, **environment})
    except OSError as error:
        raise WrongUseError(f"{words[0]} cannot be run: {error.strerror}") from None
    while True:
        try:
            return process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            try:
                held.check_ledger(held.device.key)
            except LeaseLostError:
                process.terminate()
                process.wait()
                raise
        except KeyboardInterrupt:  # the terminal sends it to the command, which decides
            continue
        except BaseException:
            process.terminate()
            process.wait()
            raise


@app.command("drain")
def drain(
    name: Name,
    reason: Annotated[str, typer.Option(help="Reason, for `qnnfarm pool show`.")],
    pool: PoolFile = None,
) -> None:
    """Grant no new leases of a device; its current holder may finish.

    Example: qnnfarm pool drain NAME --reason "new battery"
    """
    with _opened(pool) as open_pool:
        print_remark(f"{name} is {open_pool.admin.drain(name, reason)}")


@app.command("undrain")
def undrain(name: Name, pool: PoolFile = None) -> None:
    """Grant leases of a drained device again.

    Example: qnnfarm pool undrain NAME
    """
    with _opened(pool) as open_pool:
        print_remark(f"{name} is {open_pool.admin.undrain(name)}")


@app.command("reserve")
def reserve(
    names: Annotated[list[str], typer.Argument(help="Names of devices in the pool.")],
    duration: Annotated[str, typer.Option("--for", help="Duration, such as 90m, 2h, 1h30m or 1d.")],
    at: Annotated[
        str | None,
        typer.Option(help="Begin: 14:00, or '2026-11-30 14:00'; by default from now."),
    ] = None,
    pool: PoolFile = None,
) -> None:
    """Reserve devices for yourself: in that time only your processes lease them.

    A lease of somebody else that is out when the time begins ends then, as by `pool release`.
    `pool show` lists the reservations.

    Example: qnnfarm pool reserve NAME --for 2h
    """
    start = parse_start(at, datetime.now())  # noqa: DTZ005 - a person's time is that of the host
    duration_s = parse_duration(duration)
    with _opened(pool) as open_pool:
        open_pool.admin.reserve(names, duration_s, start=start)
        members = {member.name: member for member in open_pool.members()}
        for name in names:
            print_remark(f"{name} is {members[name].reservations[-1].describe(time.time())}")


@app.command("unreserve")
def unreserve(
    numbers: Annotated[list[int], typer.Argument(help="Numbers of reservations, see `show`.")],
    pool: PoolFile = None,
) -> None:
    """Cancel reservations, by their numbers.

    Example: qnnfarm pool unreserve 7
    """
    with _opened(pool) as open_pool:
        for number in numbers:
            reservation = open_pool.admin.unreserve(number)
            print_remark(f"cancelled: {reservation.describe(time.time())}")


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `1h30m`."""
    match = _DURATION.fullmatch(text)
    parts = match.groups(default="0") if match else ()
    seconds = sum(int(part) * unit for part, unit in zip(parts, (86_400, 3600, 60), strict=False))
    if not 0 < seconds <= _LONGEST_S:
        raise WrongUseError(f"--for {text}: give a duration such as 90m, 2h or 1d, 31d at most")
    return seconds


def parse_start(text: str | None, now: datetime) -> float | None:
    """Return a local time of this day, or of the next one if it is past; or a date with a time."""
    if text is None:
        return None
    with suppress(ValueError):
        clock = datetime.strptime(text, "%H:%M")  # noqa: DTZ007 - local
        day = now.date() if clock.time() > now.time() else now.date() + timedelta(days=1)
        return datetime.combine(day, clock.time()).timestamp()
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    raise WrongUseError(f"--at {text}: give a time such as 14:00, or '2026-11-30 14:00'")


@app.command("unquarantine")
def unquarantine(name: Name, pool: PoolFile = None) -> None:
    """Try a quarantined device now; if its probation run passes it is ready again.

    Example: qnnfarm pool unquarantine NAME
    """
    with _opened(pool) as open_pool:
        state = open_pool.admin.unquarantine(name, on_progress=print_remark)
        _decided(open_pool, name, str(state))


@app.command("recover")
def recover(
    name: Name,
    pool: PoolFile = None,
    take: Annotated[
        bool, typer.Option("--take", help="Take it even from a holder of another ledger.")
    ] = False,
) -> None:
    """Run the recovery steps on a device now.

    Example: qnnfarm pool recover NAME
    """
    with _opened(pool) as open_pool:
        state = open_pool.admin.recover(name, take=take, on_progress=print_remark)
        _decided(open_pool, name, str(state))


@app.command("new-id")
def new_id(pool: PoolFile = None) -> None:
    """Make the copy of a ledger, as of a cloned machine, one of its own.

    Example: qnnfarm pool new-id
    """
    config = find_config(pool)[1]
    with closing(Database(find_ledger(config))) as database:
        ledger = Ledger(database, SystemClock(), ttl_s=config.lease.ttl_s, rule=config.quarantine)
        ledger.renew_id()
    print_remark(f"{database.location} has an id of its own now")


@app.command("test-notifications")
def send_test(pool: PoolFile = None) -> None:
    """Send a test to every receiver of `notifications` in pool.yaml; exits 1 if one fails.

    Example: qnnfarm pool test-notifications
    """
    _, config = find_config(pool)
    if not config.notifications:
        print_remark("pool.yaml names no `notifications`")
    if not send_tests(config.notifications, Notification("test", "test", _TEST)):
        raise typer.Exit(BAD)


def send_tests(receivers: Sequence[ReceiverConfig], test: Notification) -> bool:
    """Send a test to each receiver, and print which took it; return whether all did."""
    success = True
    for receiver in receivers:
        try:
            send(receiver, test)
        except NotificationError as error:
            success = False
            print_remark(str(error))
        else:
            print_remark(f"{receiver.command[0]} took it")
    return success


def _opened(path: Path | None, *, probe: bool = False) -> Pool:
    return Pool.open(path, probe=probe, on_progress=print_remark)


def _decided(pool: Pool, name: str, state: str) -> None:
    """Print the outcome; exit with 1 if the device is not ready."""
    print_remark(f"{name} is {state}")
    if state != "ready":
        status = next(member for member in pool.members() if member.name == name)
        print_remark(status.reason)
        raise typer.Exit(BAD)


def _print(members: list[MemberStatus], *, json: bool) -> None:
    if json:
        print_json(
            [dataclasses.asdict(m) | {"spec": str(m.spec), "tags": sorted(m.tags)} for m in members]
        )
        return
    if not members:
        answers().print(
            "the pool has no devices: plug a phone in, name some in pool.yaml, or start a virtual "
            "one with `qnnfarm device start NAME`"
        )
        return
    print_rows(_HEADINGS, [_row(member) for member in members])


def _row(member: MemberStatus) -> Row:
    """Return a device's row; below it the failures that count against it, and reservations."""
    cells: list[Text | str] = [
        member.name,
        _state(member),
        "" if member.is_unsure else age_text(time.time() - member.since),
        " ".join(filter(None, (member.soc, member.hexagon))),
        f"{member.weight:g} of {member.limit:g}" if member.weight else "",
        str(member.token or ""),
        " ".join(sorted(member.tags)),
        member.holder or member.reason,
    ]
    reservations = [r.describe(time.time()) for r in member.reservations]
    newest = member.failures[: -_MOST_FAILURES - 1 : -1]
    notes = [one_line(failure, _LONGEST_FAILURE) for failure in newest] + reservations
    return Row(cells, [Text(note, "dim") for note in notes])


def _state(member: MemberStatus) -> Text:
    if member.is_unsure:
        return Text(member.seen, style="red" if member.state == "ready" else "yellow")
    return Text(member.state, style=_COLOURS[member.state])
