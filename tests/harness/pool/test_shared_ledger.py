"""One ledger for the users of a group: real accounts, each in processes of its own."""

import grp
import os
import pwd
import select
import shutil
import signal
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness import paths
from harness.cli.doctor import examine
from harness.clock import SystemClock
from harness.errors import LedgerError
from harness.pool.config import QuarantineConfig
from harness.pool.database import Database
from harness.pool.ledger import Ledger
from harness.pool.ledger_file import default_path
from tests.command_line import Started, qnnfarm
from tests.harness.pool.conftest import Bench
from tests.system import IMPORT_PATH, program
from tests.two_users import ANN, BOB, GROUP, TIMEOUT_S, SharedFolder, shared_folder


def _line(process: Started) -> str:
    assert select.select([process.stdout], [], [], TIMEOUT_S)[0], "it says nothing"
    return process.stdout.readline().strip()


@pytest.fixture
def shared() -> Iterator[SharedFolder]:
    """A folder of a group, for a ledger."""
    with shared_folder() as folder:
        yield folder


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


def _modes(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        path.name: (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid)
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_ledger_is_shared_under_any_umask(shared: SharedFolder, umask: int) -> None:
    holder = shared.start(ANN, _HOLD, umask=umask)
    _line(holder)
    assert set(_modes(shared.ledger)) == {"pool.db", "pool.db-wal", "pool.db-shm"}
    assert set(_modes(shared.ledger).values()) == {(0o660, GROUP)}
    waited = shared.run(BOB, _WAIT, "0.5", umask=umask)
    assert f"bench is held by {ANN}: python (pid " in waited


def test_two_users_wait_die_take_over_and_are_named(shared: SharedFolder) -> None:
    holder = shared.start(ANN, _HOLD)
    token = int(_line(holder))
    shown = shared.qnnfarm(BOB, "pool", "show")
    assert f"{ANN}: python (pid " in shown
    assert "nightly" in shown
    waiter = shared.start(BOB, _WAIT, "60")
    holder.send_signal(signal.SIGKILL)
    assert _line(waiter) == f"{token + 1} {BOB}"
    assert waiter.wait(TIMEOUT_S) == 0
    again = shared.start(ANN, _HOLD)
    _line(again)
    assert "released bench" in shared.qnnfarm(BOB, "pool", "release", "bench")
    shared.qnnfarm(ANN, "pool", "drain", "bench", "--reason", "a new battery")
    assert f"a new battery ({ANN})" in shared.qnnfarm(BOB, "pool", "show")
    shared.qnnfarm(BOB, "pool", "undrain", "bench")
    history = shared.qnnfarm(ANN, "pool", "history", "bench")
    for words in (
        f"{ANN}: python (pid {holder.pid}) is gone",
        f"held by {BOB}: python (pid {waiter.pid})",
        f"{BOB}: cli (pid ",
        f"undrained ({BOB})",
    ):
        assert words in history
    assert "root:" not in history


def test_what_is_one_users_does_not_lie_in_the_folder_of_all(
    shared: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = shared.run(ANN, "from harness.paths import state_dir; print(state_dir())")
    assert shown.strip() == str(shared.folder / f"home-{ANN}/.local/state/qnnfarm")
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(shared.ledger))
    assert paths.state_dir() != shared.ledger
    shared.ledger.chmod(0o2700)  # what a folder in somebody's setgid folder gets
    assert paths.state_dir() == shared.ledger


def test_the_folder_of_this_host_is_used_where_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QNNFARM_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own"))
    everyones = tmp_path / "everyones"
    monkeypatch.setattr(paths, "SYSTEM_LEDGER_DIR", everyones)
    assert default_path() == tmp_path / "own/qnnfarm/pool.db"
    everyones.mkdir()
    assert default_path() == everyones / "pool.db"
    assert paths.state_dir() == tmp_path / "own/qnnfarm"
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(tmp_path / "other"))
    assert default_path() == tmp_path / "other/pool.db"


def test_a_ledger_of_one_user_becomes_one_of_a_group(shared: SharedFolder) -> None:
    """Also with the side files that a killed process left."""
    account = pwd.getpwnam(ANN)
    os.chown(shared.ledger, account.pw_uid, GROUP)
    shared.ledger.chmod(0o700)
    holder = shared.start(ANN, _HOLD, umask=0o022)
    _line(holder)
    holder.kill()
    holder.wait()
    assert (0o644, account.pw_gid) in _modes(shared.ledger).values()
    shared.ledger.chmod(0o2770)

    refused = shared.qnnfarm(BOB, "pool", "show")
    assert f"pool.db belongs to {ANN} and is not shared with the group: `sudo chgrp" in refused
    assert "ready" in shared.qnnfarm(ANN, "pool", "show")
    assert "ready" in shared.qnnfarm(BOB, "pool", "show")


_OBSTACLES = (
    (0o2777, (GROUP,), "every user of this host may write its folder (mode 2777): `chmod o-w "),
    (0o1777, (GROUP,), "every user of this host may write its folder (mode 1777): `chmod o-w "),
    (0o0770, (GROUP,), "its folder belongs to root and is not set up for a group: `chgrp GROUP"),
    (0o2770, (), f"the group users, which {BOB} is not in: `sudo usermod -aG users {BOB}`"),
)


def test_a_folder_that_cannot_be_shared_is_refused_in_one_line(shared: SharedFolder) -> None:
    for mode, groups, said in _OBSTACLES:
        shared.ledger.chmod(mode)
        told = shared.run(BOB, _WAIT, "1", groups=groups).splitlines()[-1]
        assert said in told
        assert f"the ledger of leases {shared.ledger}/pool.db cannot be used" in told
        assert list(shared.ledger.iterdir()) == []


def test_doctor_says_whose_the_ledger_is(
    shared: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNNFARM_STATE_DIR", str(shared.ledger))
    (found,) = [finding for finding in examine() if finding.subject == "pool ledger"]
    group = grp.getgrgid(GROUP).gr_name
    assert (found.state, found.detail) == ("ok", f"{shared.ledger}/pool.db, of the group {group}")
    shared.ledger.chmod(0o2777)
    (found,) = [finding for finding in examine() if finding.subject == "pool ledger"]
    assert found.state == "broken"
    assert "chmod o-w" in found.detail
    assert list(shared.ledger.iterdir()) == []


def test_a_link_in_the_folder_of_a_group_is_not_followed(shared: SharedFolder) -> None:
    """A member of the group could lay one to a file of another member, who would share it."""
    secret = shared.folder / "secret"
    secret.write_text("")
    secret.chmod(0o600)
    for name in ("pool.db", "pool.db-shm"):
        (shared.ledger / name).symlink_to(secret)
        with pytest.raises(LedgerError, match=f"{name} is a link"), _ledger(shared) as ledger:
            ledger.reconcile()
        (shared.ledger / name).unlink()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


class _ledger:  # noqa: N801 - a context manager
    """The ledger as root uses it in this process."""

    def __init__(self, shared: SharedFolder) -> None:
        self._database = Database(shared.ledger / "pool.db")
        self.ledger = Ledger(self._database, SystemClock(), ttl_s=30, rule=QuarantineConfig())

    def __enter__(self) -> Ledger:
        return self.ledger

    def __exit__(self, *_: object) -> None:
        self._database.close()


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
    for words in (("show",), ("show", "--json"), ("history", "bench"), ("release", "bench")):
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
@pytest.mark.parametrize("hidepid", [1, 2])
def test_a_live_holder_that_proc_hides_keeps_its_lease(shared: SharedFolder, hidepid: int) -> None:
    look = """
import os, sys
from harness.pool.owner import Owner, has_ended, this_process
from dataclasses import replace
alive, ended, started = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
me = this_process()
print(os.path.exists(f"/proc/{alive}/stat") and os.access(f"/proc/{alive}/stat", os.R_OK))
print(has_ended(me), *(has_ended(replace(me, pid=p, started=started)) for p in (alive, ended)))
"""
    ended = shared.start(ANN, "")
    ended.wait()
    alive = subprocess.Popen(shared.command(ANN, ["sleep", "600"], 0o077, ()))
    try:
        stat_words = Path(f"/proc/{alive.pid}/stat").read_text().rpartition(")")[2].split()
        words = [shared.python, "-c", look, str(alive.pid), str(ended.pid), stat_words[19]]
        as_bob = shared.command(BOB, words, 0o077, (GROUP,))
        done = subprocess.run(
            [
                str(program("unshare")), "--mount", "sh", "-c",
                f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"', "sh",
                *as_bob,
            ],
            env=shared.environment(BOB) | {"PYTHONPATH": IMPORT_PATH},
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.stdout.splitlines() == ["False", "False False True"], done.stderr
    finally:
        alive.kill()
        alive.wait()


def test_virtual_devices_of_two_users_are_two_devices(shared: SharedFolder) -> None:
    """Each user's `virtual:alpha` is a device of its own."""
    record = """
import sys
from harness.clock import SystemClock
from harness.pool.database import Database
from harness.pool.config import QuarantineConfig
from harness.pool.ledger import Ledger
from harness.pool.ledger_file import default_path
from harness.pool.records import Facts
ledger = Ledger(Database(default_path()), SystemClock(), ttl_s=30, rule=QuarantineConfig())
ledger.record_found(sys.argv[1], "alpha", "virtual:alpha", Facts())
ledger.record_found("hardware:R5", "phone", "android:R5", Facts())
print(*sorted(ledger.keys_of(["virtual:alpha", "android:R5"]).values()))
"""
    for user in (ANN, BOB, ANN):
        found = shared.run(user, record, f"hardware:of-{user}")
        assert found == f"hardware:R5 hardware:of-{user}\n"


def test_a_work_root_of_another_user_is_not_taken_from_the_ledger(shared: SharedFolder) -> None:
    """Whoever can change scripts between their check and their run would run them as the holder."""
    shared.run(BOB, _WAIT, "60")
    theirs = shared.folder / "theirs"
    own = next((shared.folder / f"home-{BOB}/.cache").rglob("fence.sh")).parents[2]
    shutil.copytree(own, theirs)
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, pwd.getpwnam(ANN).pw_uid, -1)
        path.chmod(0o777)
    with closing(sqlite3.connect(shared.ledger / "pool.db")) as db, db:
        (root,) = db.execute("SELECT root FROM pool_devices").fetchone()
        assert Path(root) == own
        db.execute("UPDATE pool_devices SET root = ?", (str(theirs),))
    assert shared.run(BOB, _WAIT, "60").split() == ["2", BOB]
    with closing(sqlite3.connect(shared.ledger / "pool.db")) as db:
        assert db.execute("SELECT root FROM pool_devices").fetchone()[0] == root
