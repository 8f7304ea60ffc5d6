"""The memo of hashes is never believed when the file may be another."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.deploy import hashing
from harness.deploy.hashing import hash_files
from harness.errors import HostFileError


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files just written count as settled, so that the memo takes them."""
    monkeypatch.setattr(hashing, "_SETTLED_S", -1.0)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.usefixtures("old")
def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    first = hash_files([file], tmp_path / "memo")
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert hash_files([file], tmp_path / "memo") == first
    assert (first[file].sha256, first[file].size) == (_sha256(b"one"), 3)


@pytest.mark.usefixtures("old")
def test_a_change_of_same_size_and_mtime_is_seen(tmp_path: Path) -> None:
    file, memo = tmp_path / "f", tmp_path / "memo"
    file.write_bytes(b"one")
    hash_files([file], memo)
    status = file.stat()
    time.sleep(0.02)
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hash_files([file], memo)[file].sha256 == _sha256(b"two")


def test_a_fresh_file_is_not_remembered(tmp_path: Path) -> None:
    file, memo = tmp_path / "f", tmp_path / "memo"
    file.write_bytes(b"one")
    hash_files([file], memo)
    assert b"" + hashlib.sha256(b"one").hexdigest().encode() not in memo.read_bytes()


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    "damage", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 9]
)
def test_a_damaged_memo_is_replaced(tmp_path: Path, damage: bytes) -> None:
    file, memo = tmp_path / "f", tmp_path / "memo"
    file.write_bytes(b"one")
    memo.write_bytes(damage)
    assert hash_files([file], memo)[file].sha256 == _sha256(b"one")
    assert hash_files([file], memo)[file].sha256 == _sha256(b"one")


def test_a_memo_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    assert hash_files([file], file / "below-a-file")[file].sha256 == _sha256(b"one")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    file.write_bytes(b"one")
    assert hash_files([file], tmp_path / "memo")[file].size == 3


def test_what_cannot_be_hashed(tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "absent"):
        with pytest.raises(HostFileError):
            hash_files([bad], tmp_path / "memo")


def test_many_processes_share_a_memo(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"f{number}").write_bytes(b"%d" % number)
    code = (
        "import sys; from pathlib import Path; from harness.deploy import hashing as h;"
        "h._SETTLED_S = -1; p = Path(sys.argv[1]);"
        "print(len(h.hash_files(sorted(p.glob('f*')), p / 'memo')))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in running] == [b"20\n"] * 3
