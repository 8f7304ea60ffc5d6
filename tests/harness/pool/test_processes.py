"""Several processes at one ledger: each request is served once and in order."""

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.clock import SystemClock
from harness.pool.config import QuarantineConfig
from harness.pool.database import Database
from harness.pool.ledger import Ledger
from harness.pool.records import Facts
from tests.command_line import Started

_PROGRAM = """
import json, os, sys, time
from pathlib import Path
from harness.clock import SystemClock
from harness.pool.database import Database
from harness.pool.config import QuarantineConfig
from harness.pool.ledger import Ledger
from harness.pool.owner import this_process

folder, ttl, count, rounds, devices = Path(sys.argv[1]), *map(int, sys.argv[2:])
ledger = Ledger(Database(folder / "pool.db"), SystemClock(), ttl_s=ttl, rule=QuarantineConfig())
me = this_process()
for _ in range(rounds):
    ticket = ledger.enqueue(me, ["a", "b", "c"][:devices], count)
    while not (rows := ledger.try_grant(ticket)):
        time.sleep(0.02)
    ledger.settle(ticket)
    grant, keys = rows[0].grant, [row.key for row in rows]
    for key in keys:  # a second holder would fail here
        os.close(os.open(folder / f"held-{key}", os.O_CREAT | os.O_EXCL))
    for key in keys:
        (folder / f"held-{key}").unlink()
    assert ledger.release(grant, keys) == set(keys)
    print(json.dumps([ticket, rows[0].token]), flush=True)
"""


_TTL_S = 3600
"""However slow the machine is: who waits keeps the place, and no lease runs out by itself."""


def start(folder: Path, *, count: int = 1, rounds: int, devices: int = 3) -> Started:
    numbers = [str(n) for n in (_TTL_S, count, rounds, devices)]
    return Started("-c", _PROGRAM, folder, *numbers)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Database(tmp_path / "pool.db")) as database:
        made = Ledger(database, SystemClock(), ttl_s=_TTL_S, rule=QuarantineConfig())
        for key in "abc":
            made.record_found(key, key, f"spec:{key}", Facts())
        yield made


def served(processes: list[Started]) -> list[tuple[int, int]]:
    """The tickets and tokens of all processes, at their end."""
    lines = []
    for process in processes:
        said, _ = process.communicate(timeout=280)
        assert process.returncode == 0
        lines += said.splitlines()
    return [(ticket, token) for ticket, token in map(json.loads, lines)]


def test_contending_processes_are_each_served_once(tmp_path: Path, ledger: Ledger) -> None:
    tokens = [
        token for _, token in served([start(tmp_path, count=n % 3 + 1, rounds=4) for n in range(3)])
    ]
    assert len(tokens) == 3 * 4
    assert len(set(tokens)) == len(tokens)
    assert {str(row.state) for row in ledger.rows("abc").values()} == {"ready"}
    assert ledger.waiting() == []


def test_a_killed_process_in_a_transaction_leaves_the_ledger_whole(
    tmp_path: Path, ledger: Ledger
) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from harness.pool.database import Database
from harness.pool.records import devices

def work(db):
    db.execute(devices.delete())
    os.kill(os.getpid(), signal.SIGKILL)

Database(Path(sys.argv[1])).write(work)
"""
    assert Started("-c", program, tmp_path / "pool.db").wait() == -signal.SIGKILL
    assert set(ledger.rows("abc")) == set("abc")


def test_many_processes_create_the_ledger_at_once(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from sqlalchemy import text
from harness.pool.database import Database

more = text("UPDATE pool_counters SET value = value + 1 WHERE name = 'token'")
tokens = text("SELECT value FROM pool_counters WHERE name = 'token'")
for number in range(2):
    path, (gate, start) = Path(sys.argv[1], f"{number}.db"), os.pipe()
    children = []
    for _ in range(5):
        child = os.fork()
        if not child:
            os.close(start)
            os.read(gate, 1)  # all begin when it closes
            try:
                Database(path).write(lambda db: db.execute(more))
            except BaseException as error:
                print(repr(error), flush=True)
            os._exit(0)
        children.append(child)
    os.close(start)
    os.close(gate)
    for child in children:
        os.waitpid(child, 0)
    print(Database(path).read(lambda db: db.scalar(tokens)))
"""
    with Started("-c", program, tmp_path) as process:
        said, _ = process.communicate(timeout=280)
    assert said.split("\n")[:-1] == ["5"] * 2
