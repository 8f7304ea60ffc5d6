"""Users of one host who share a ledger in PostgreSQL, and what others may write into a ledger."""

import os
import pwd
import select
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.clock import SystemClock
from harness.errors import LedgerError
from tests.command_line import QNNFARM, Started, qnnfarm
from tests.harness.pool.conftest import Bench
from tests.postgresql_server import PostgresqlServer
from tests.system import IMPORT_PATH, needs, program, python_for_others

ANN, BOB = "daemon", "nobody"
TIMEOUT_S = 120


_AS_USER = """
import os
os.setgroups([])
os.setgid({gid})
os.setuid({uid})
os.umask(0o077)
os.dup2(1, 2)
"""


@dataclass
class TwoUsers:
    """Two users of a ledger, and a folder that both may read."""

    folder: Path
    ledger: str
    python: str
    running: list[Started] = field(default_factory=list)

    def command(self, user: str, words: Sequence[str]) -> list[str]:
        account = pwd.getpwnam(user)
        ids = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        return [str(program("setpriv")), *ids, "sh", "-c", 'umask 077; exec "$@"', "sh", *words]

    def environment(self, user: str) -> dict[str, str]:
        home = self.folder / f"home-{user}"
        if not home.exists():
            home.mkdir(mode=0o700)
            os.chown(home, pwd.getpwnam(user).pw_uid, -1)
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "USER": "root",  # a name that anybody may claim
            "LOGNAME": "root",
            "QNNFARM_LEDGER": self.ledger,
            "QNNFARM_POOL": str(self.folder / "pool.yaml"),
        }

    def start(self, user: str, program: str, *words: str | Path) -> Started:
        """Start a program of Python as a user, whose errors are printed as its answers are."""
        account = pwd.getpwnam(user)
        become = _AS_USER.format(uid=account.pw_uid, gid=account.pw_gid)
        process = Started(
            "-c", become + program, *words, cwd=self.folder, env=self.environment(user)
        )
        self.running.append(process)
        return process

    def run(self, user: str, program: str, *words: str | Path) -> str:
        """Run one to its end; gives what it printed."""
        return self.start(user, program, *words).communicate(timeout=TIMEOUT_S)[0]

    def qnnfarm(self, user: str, *words: str) -> str:
        """Run a command of ours as a user; gives what it printed."""
        return self.run(user, QNNFARM, *words)


@contextmanager
def two_users(ledger: str) -> Iterator[TwoUsers]:
    """Give two users of the ledger at a URL; skips where nobody can become two users."""
    needs("second-user")
    python = python_for_others()
    assert python is not None
    folder = Path(tempfile.mkdtemp(prefix="qnnfarm-shared-"))  # pytest's own lets nobody else in
    folder.chmod(0o755)
    made = TwoUsers(folder, ledger, python)
    (folder / "pool.yaml").write_text("devices: [{type: local, name: bench}]\n")
    try:
        yield made
    finally:
        for process in made.running:
            process.kill()
            process.communicate()
        shutil.rmtree(folder)


def _line(process: Started) -> str:
    assert select.select([process.stdout], [], [], TIMEOUT_S)[0], "it says nothing"
    return process.stdout.readline().strip()


@pytest.fixture
def users(server_location: str) -> Iterator[TwoUsers]:
    """Two users of a ledger."""
    with two_users(server_location) as made:
        yield made


_HOLD = """
import time
from pathlib import Path
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement

with Pool.open() as pool, pool.acquire(Requirement(), purpose="nightly") as lease:
    print(lease.token, flush=True)
    time.sleep(600)
"""
_WAIT = """
import sys
from harness.errors import LeaseTimeoutError
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement

with Pool.open() as pool:
    try:
        with pool.acquire(Requirement(), timeout_s=float(sys.argv[1])) as lease:
            print(lease.token, lease.device.shell("id -un").stdout, flush=True)
    except LeaseTimeoutError as error:
        print(error, flush=True)
"""


def test_two_users_wait_die_take_over_and_are_named(users: TwoUsers) -> None:
    holder = users.start(ANN, _HOLD)
    token = int(_line(holder))
    shown = users.qnnfarm(BOB, "pool", "show")
    assert f"{ANN}: python (pid " in shown
    assert "nightly" in shown
    waiter = users.start(BOB, _WAIT, "60")
    holder.send_signal(signal.SIGKILL)
    assert _line(waiter) == f"{token + 1} {BOB}"
    assert waiter.wait(TIMEOUT_S) == 0
    again = users.start(ANN, _HOLD)
    _line(again)
    assert "released bench" in users.qnnfarm(BOB, "pool", "release", "bench")
    history = users.qnnfarm(ANN, "pool", "history", "bench")
    for words in (
        f"{ANN}: python (pid {holder.pid}) is gone",
        f"held by {BOB}: python (pid {waiter.pid})",
        f"{BOB}: cli (pid ",
    ):
        assert words in history
    assert "root:" not in history


def test_text_that_another_user_wrote_reaches_no_terminal_raw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("QNNFARM_POOL", str(tmp_path / "pool.yaml"))
    (tmp_path / "pool.yaml").write_text("devices: [{type: local, name: bench}]\n")
    evil = "\x1b]0;owned\x07\x1b[2J\u202eevil\x9b31m"
    qnnfarm("pool", "drain", "bench", "--reason", "x")
    with closing(sqlite3.connect(tmp_path / "pool.db")) as db, db:
        db.execute("UPDATE pool_devices SET reason = ?, soc = ?, step = ?", (evil, evil, evil))
        db.execute(
            "INSERT INTO pool_history (key, at, what, text) SELECT key, 0, ?, ? FROM pool_devices",
            (evil, evil),
        )
        db.execute(
            "INSERT INTO pool_evidence (key, at, lease, kind, weight, text)"
            " SELECT key, 0, leases, ?, 1, ? FROM pool_devices",
            (evil, evil),
        )
        db.execute(
            "INSERT INTO pool_leases SELECT key, 7, '', ?, 0, '', ?, 'boot', ?, 0, 'ns', ?, ?, 1e9"
            " FROM pool_devices",
            (evil, evil, os.getpid(), evil, SystemClock().boottime()),
        )
    for words in (("show",), ("history", "bench")):
        done = qnnfarm("pool", *words)
        shown = done.stdout + done.stderr
        assert shown.replace("\n", "").isprintable(), words
        assert "Traceback" not in shown


_TICKET_OF_NOTHING = "INSERT INTO pool_tickets (candidates) VALUES ('[[]]')"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE pool_devices SET state = 'melted'", "'melted' is not a valid MemberState"),
        (_TICKET_OF_NOTHING, r"'\[\[\]\]' lists no devices"),
        ("UPDATE pool_devices SET reason = CAST(x'1bff' AS TEXT)", "Could not decode to UTF-8"),
    ],
)
def test_a_ledger_with_nonsense_is_told_in_one_line(
    bench: Bench, statement: str, said: str
) -> None:
    bench.add("a")
    bench.sql(statement)
    with pytest.raises(LedgerError, match=f"{bench.path} cannot be used: {said}") as caught:
        bench.ledger.rows(["a"]), bench.ledger.waiting()
    assert str(caught.value).isprintable()


@pytest.mark.needs("namespaces")
def test_a_live_holder_that_proc_hides_keeps_its_lease(users: TwoUsers) -> None:
    look = """
import os, sys
from harness.pool.owner import Owner, has_ended, this_process
from dataclasses import replace
alive, ended, started = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
me = this_process()
print(os.path.exists(f"/proc/{alive}/stat") and os.access(f"/proc/{alive}/stat", os.R_OK))
print(has_ended(me), *(has_ended(replace(me, pid=p, started=started)) for p in (alive, ended)))
"""
    ended = users.start(ANN, "")
    ended.wait()
    alive = subprocess.Popen(users.command(ANN, ["sleep", "600"]))
    try:
        stat_words = Path(f"/proc/{alive.pid}/stat").read_text().rpartition(")")[2].split()
        words = [users.python, "-c", look, str(alive.pid), str(ended.pid), stat_words[19]]
        as_bob = users.command(BOB, words)
        done = subprocess.run(
            [
                str(program("unshare")), "--mount", "sh", "-c",
                'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh",
                *as_bob,
            ],
            env=users.environment(BOB) | {"PYTHONPATH": IMPORT_PATH},
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.stdout.splitlines() == ["False", "False False True"], done.stderr
    finally:
        alive.kill()
        alive.wait()


def test_a_work_root_of_another_user_is_not_taken_from_the_ledger(
    users: TwoUsers, postgresql_server: PostgresqlServer
) -> None:
    """Whoever can change scripts between their check and their run would run them as the holder."""
    users.run(BOB, _WAIT, "60")
    theirs = users.folder / "theirs"
    own = next((users.folder / f"home-{BOB}/.cache").rglob("fence.sh")).parents[2]
    shutil.copytree(own, theirs)
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, pwd.getpwnam(ANN).pw_uid, -1)
        path.chmod(0o777)
    with closing(postgresql_server.connect()) as ledger:
        assert ledger.execute("SELECT root FROM pool_devices").fetchall() == [(str(own),)]
        ledger.execute("UPDATE pool_devices SET root = %s", [str(theirs)])
        assert users.run(BOB, _WAIT, "60").split() == ["2", BOB]
        assert ledger.execute("SELECT root FROM pool_devices").fetchall() == [(str(own),)]
