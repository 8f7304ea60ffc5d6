"""Two users at one ledger, whose processes are killed and suspended: no device has two holders."""

import random
import signal
import time

import pytest

from tests.campaigns import say
from tests.chaos.test_chaos import FAULTS, SEED
from tests.command_line import Started
from tests.two_users import ANN, BOB, SharedFolder, shared_folder
from tests.waiting import wait_for

_PROGRAM = """
import os, random, sys, time
said = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
os.dup2(said, 1), os.dup2(said, 2)
from contextlib import suppress
from pathlib import Path
from harness.clock import SystemClock
from harness.pool.database import Database
from harness.pool.config import QuarantineConfig
from harness.pool.ledger import Ledger
from harness.pool.ledger_file import default_path
from harness.pool.owner import this_process
from harness.pool.records import Facts

marks = Path(sys.argv[1])
ledger = Ledger(Database(default_path()), SystemClock(), ttl_s=3600, rule=QuarantineConfig())
for key in "abc":
    ledger.record_found(key, key, f"spec:{key}", Facts())
me = this_process()

def lives(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False

while True:
    ticket = ledger.enqueue(me, list("abc"), random.choice((1, 1, 2)))
    while not (rows := ledger.try_grant(ticket)):
        time.sleep(0.003)
    ledger.settle(ticket)
    mine = [marks / f"{row.key} {os.getpid()}" for row in rows]
    for row, mark in zip(rows, mine):
        for other in marks.glob(f"{row.key} *"):
            if lives(other.name.split()[1]) and other.exists():
                print("two holders:", other.name, mark.name, flush=True)
        mark.touch()
    time.sleep(random.random() * 0.01)
    for mark in mine:
        mark.unlink()
    ledger.release(rows[0].grant, [row.key for row in rows])
    print("lease", rows[0].token, flush=True)
"""


def _campaign(shared: SharedFolder, seed: int, faults: int) -> list[str]:
    """Strike six processes of two users; gives what they said."""
    drawn = random.Random(seed)  # noqa: S311 - no secret
    marks, said = shared.folder / "marks", shared.folder / "said"
    marks.mkdir()
    marks.chmod(0o777)
    said.touch()
    said.chmod(0o666)

    def start(user: str) -> Started:
        umask = drawn.choice((0o000, 0o022, 0o077))
        return shared.start(user, _PROGRAM, marks, said, umask=umask)

    running = [(user, start(user)) for user in (ANN, BOB) * 3]

    def granted() -> int:
        return said.read_bytes().count(b"lease ")

    try:
        wait_for(granted)
        for _ in range(faults):
            before = granted()
            number = drawn.randrange(len(running))
            user, process = running[number]
            if drawn.random() < 0.5:
                process.send_signal(signal.SIGSTOP)
                time.sleep(drawn.uniform(0.05, 0.2))
                process.send_signal(signal.SIGCONT)
            else:
                process.kill()
                process.wait()
                running[number] = user, start(user)
            time.sleep(drawn.uniform(0.05, 0.3))
            wait_for(lambda: granted() > before, said.read_text)  # noqa: B023
    finally:
        for _, process in running:
            process.kill()
            process.wait()
    return said.read_text().splitlines()


def _check(shared: SharedFolder, seed: int, faults: int) -> None:
    told = _campaign(shared, seed, faults)
    leases = [line for line in told if line.startswith("lease ")]
    say(f"{len(leases)} leases of two users, {faults} strikes, seed {seed}")
    assert [line for line in told if line not in leases] == []
    assert len(set(leases)) == len(leases) > faults
    assert {oct(file.stat().st_mode & 0o777) for file in shared.ledger.iterdir()} == {"0o660"}


def test_a_few_strikes() -> None:
    with shared_folder() as shared:
        _check(shared, SEED, 5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_strikes() -> None:
    with shared_folder() as shared:
        _check(shared, SEED, max(FAULTS // 7, 5))
