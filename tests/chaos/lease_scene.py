"""Processes that contend for the devices of a pool, and write down on them who had them when.

In the scene `lease` they share a ledger, in `ledgers` each has one of its own: as users of two
hosts, they see each other on the devices alone.
"""

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from itertools import groupby

from harness.pool.lease import LeasedDevice
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from tests.chaos.actors import Actor, Tell
from tests.chaos.drawing import DEVICES, TOKEN, Case
from tests.chaos.ends import End, end_of
from tests.chaos.lab import Farm, Lab, patient
from tests.device_echo import echo_on

_ACQUIRE_S = 25.0
_COMMAND_S = 6.0
_ANSWER_S = 5.0
_NAP = "import sys, time; time.sleep(float(sys.argv[1]))"


def begin(lab: Lab, farm: Farm, case: Case) -> list[Actor]:
    """Holders; each leases, writes, works and writes again, a few times."""
    for number in range(DEVICES):
        (farm.work_root(number).parent / "holders").unlink(missing_ok=True)
    return [_holder(lab, farm, case, number) for number in range(case.actors)]


def _holder(lab: Lab, farm: Farm, case: Case, number: int) -> Actor:
    chance = case.chance(f"holder {number}")
    rounds = chance.randint(1, 3)
    plans = [
        (
            pick_requirement(chance.random(), farm),
            round(chance.uniform(0.0, 0.6), 2),
            chance.random() < 0.2,
            chance.random() < 0.3,
        )
        for _ in range(rounds)
    ]

    acquire_s, command_s = patient(_ACQUIRE_S), patient(_COMMAND_S)
    ledger = number if case.scene == "ledgers" else 0

    def part(tell: Tell) -> None:
        if case.scene == "ledgers":
            os.environ["QNNFARM_STATE_DIR"] = str(lab.folder / f"state-{number}")
        with Pool.open(farm.pool_file) as pool, contextlib.ExitStack() as stack:
            for requirement, work_s, daemon, forwards in plans:
                links: list[socket.socket] = []
                with (
                    _ended(links, tell),
                    pool.acquire(requirement, timeout_s=acquire_s, purpose=case.name) as lease,
                ):
                    for device in lease.devices:
                        if forwards:
                            links += _connect(device, stack)
                        book = f"{device.work_root.removesuffix('/qnnfarm')}/holders"
                        word = secrets.token_hex(4)
                        holder = f"{ledger}.{lease.token}"
                        write = f"echo {holder} {word} >>{book}"
                        device.shell(write, timeout_s=command_s)
                        nap = ["python3", "-c", _NAP, str(work_s), TOKEN]
                        device.shell(nap, timeout_s=command_s)
                        if daemon:
                            left = f"setsid sleep 600 {TOKEN} </dev/null >/dev/null 2>&1 &"
                            device.shell(left.replace(TOKEN, ""), timeout_s=command_s)
                        said = device.shell(f"{write}\ntail -n 1 {book}", timeout_s=command_s)
                        lease.check()
                        if said.stdout.split() != [holder, word]:
                            tell({"complaint": f"somebody wrote {said.stdout!r} under our lease"})
                tell({"round": lease.token})

    return Actor(f"holder {number}", part, lab.folder / f"{case.name}-{number}.log")


def _connect(device: LeasedDevice, stack: contextlib.ExitStack) -> Iterator[socket.socket]:
    """A connection through a forward that nobody closes; none where the device does not let us."""
    port = stack.enter_context(echo_on(device.unleased))  # it outlives the lease
    address = stack.enter_context(device.forward(f"tcp:{port}"))
    link = stack.enter_context(socket.create_connection(address, patient(_ANSWER_S)))
    if _answers(link):
        yield link


@contextlib.contextmanager
def _ended(links: list[socket.socket], tell: Tell) -> Iterator[None]:
    """However a lease ends, nothing gets through its forwards then."""
    try:
        yield
    finally:
        if any(map(_answers, links)):
            tell({"complaint": "a connection outlived its lease"})


def _answers(link: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        link.sendall(b"x")
        return link.recv(1) == b"x"
    return False


def pick_requirement(dice: float, farm: Farm) -> Requirement:
    """Any device, the first, or both at once."""
    if dice < 0.3:
        return Requirement(name=farm.member(0))
    return Requirement(count=DEVICES) if dice < 0.5 else Requirement()


def judge(
    lab: Lab, farm: Farm, case: Case, actors: list[Actor], struck: set[str]
) -> tuple[list[End], list[str]]:
    """A holder writes nothing once another has written, and tokens of a ledger rise by each grant.

    Those of two ledgers say nothing of each other.
    """
    complaints = [
        line["complaint"] for actor in actors for line in actor.told if "complaint" in line
    ]
    for number in range(DEVICES):
        book = farm.work_root(number).parent / "holders"
        lines = book.read_text().splitlines() if book.exists() else []
        holders = [line.split()[0] for line in lines if line.strip("\0 ")]
        turns = [holder for holder, _ in groupby(holders)]
        tokens = [tuple(map(int, holder.split("."))) for holder in turns]
        if len(set(turns)) != len(turns) or sorted(tokens) != sorted(tokens, key=lambda t: t[0]):
            complaints.append(f"late writes on d{number}: {holders}")
    return [end_of(actor) for actor in actors], complaints
