"""Disks under the ledger: a full one, and one that other hosts have mounted, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import LedgerError
from harness.pool import database
from tests.harness.pool.conftest import on_a_small_disk

_PROGRAM = """
import sys
from contextlib import closing, suppress
from pathlib import Path
from harness.clock import SystemClock
from harness.errors import LedgerError
from harness.pool.database import Database
from harness.pool.config import QuarantineConfig
from harness.pool.ledger import Ledger
from harness.pool.records import Facts

folder = Path(sys.argv[1])
for is_full in (True, False, True, False):  # a new ledger, and an old one
    (folder / "filler").unlink(missing_ok=True)
    if is_full:
        with suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    for _ in range(1 + is_full):
        try:
            with closing(Database(folder / "state" / "pool.db")) as database:
                ledger = Ledger(database, SystemClock(), ttl_s=30, rule=QuarantineConfig())
                for number in range(200 if is_full else 20):
                    ledger.record_found(f"key {number}", "x" * 900, f"spec {number}", Facts())
            print("fine")
        except LedgerError as error:
            print(error)
"""


@pytest.mark.needs("namespaces")
def test_a_full_disk_is_told_as_one_and_the_ledger_works_again_after_it(tmp_path: Path) -> None:
    """A disk of the test's own, in memory, in a mount namespace."""
    words = (sys.executable, "-c", _PROGRAM, str(tmp_path))
    done = subprocess.run(
        on_a_small_disk(tmp_path, "1m", *words), capture_output=True, text=True, check=False
    )
    full = (
        f"the ledger of leases {tmp_path}/state/pool.db cannot be used: "
        f"no space is left on the disk of {tmp_path}/state: free some there"
    )
    assert done.stdout.splitlines() == [full, full, "fine"] * 2, done.stderr


def test_a_folder_of_others_has_no_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(LedgerError, match=r"every user .* \(mode 0777\): `chmod o-w"):
        database.prepare(tmp_path / "pool.db")
    tmp_path.chmod(0o2770)
    database.prepare(tmp_path / "pool.db")
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(LedgerError, match=r"its folder belongs to .*: name another"):
        database.prepare(tmp_path / "pool.db")


@pytest.mark.parametrize(
    ("kind", "is_network"),
    [("nfs4", True), ("cifs", True), ("9p", True), ("fuse.sshfs", True), ("ext4", False),
     ("tmpfs", False), ("overlay", False), ("fuse.mergerfs", False)],
)  # fmt: skip
def test_a_ledger_on_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, *, is_network: bool
) -> None:
    device = tmp_path.stat().st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:21 / / rw shared:1 - nfs server:/root rw\n"
        f"36 35 {numbers} /a\\040b /mnt rw,noatime master:1 - {kind} server:/home rw\n"
    )
    found = database.network_file_system(tmp_path, mounts)
    assert found == (kind if is_network else "")
    monkeypatch.setattr(database, "network_file_system", lambda _: found)
    if is_network:
        with pytest.raises(LedgerError, match=rf"network file system \({kind}\).*PostgreSQL"):
            database.prepare(tmp_path / "pool.db")
    else:
        database.prepare(tmp_path / "pool.db")
