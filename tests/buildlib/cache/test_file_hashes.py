"""The memo of hashes is never believed when the file may be another."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from buildlib.cache import file_hashes
from buildlib.cache.file_hashes import HashMemo, hash_files
from buildlib.errors import InputFileError

LARGE = 3_000_000


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files just written count as settled, so that the memo takes them."""
    monkeypatch.setattr(file_hashes, "_SETTLED_S", -1.0)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("size", [3, LARGE])
def test_a_file_is_read_once_and_a_large_one_whatever_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    file, memo = tmp_path / "f", tmp_path / "memo"
    file.write_bytes(os.urandom(size))
    first = hash_files([file], memo)[file]
    assert (first.sha256, first.size) == (_sha256(file.read_bytes()), size)
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert hash_files([file], memo)[file] == first
    for number in range(3 if size == LARGE else 0):
        link = tmp_path / f"link{number}"
        link.hardlink_to(file)
        assert hash_files([link], memo)[link] == first
    (tmp_path / "link1").unlink(missing_ok=True)
    assert hash_files([file], memo)[file] == first


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("linked", [False, True])
def test_a_change_of_same_size_and_mtime_is_seen(
    tmp_path: Path, size: int, *, linked: bool
) -> None:
    file, memo = tmp_path / "f", tmp_path / "memo"
    file.write_bytes(b"1" * size)
    hash_files([file], memo)
    status = file.stat()
    time.sleep(0.02)
    if linked:
        (tmp_path / "link").hardlink_to(file)
    file.write_bytes(b"2" * size)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hash_files([file], memo)[file].sha256 == _sha256(b"2" * size)


@pytest.mark.parametrize("linked", [False, True])
def test_a_fresh_file_is_not_remembered_unless_its_only_writer_says_so(
    tmp_path: Path, *, linked: bool
) -> None:
    file, memo = tmp_path / "f", tmp_path / "memo"
    file.write_bytes(b"one")
    hash_files([file], memo)
    assert _sha256(b"one").encode() not in memo.read_bytes()
    if linked:
        (tmp_path / "link").hardlink_to(file)
    with HashMemo(memo) as known:
        known.remember(file, "word of its writer")
        trusted = _sha256(b"one") if linked else "word of its writer"
        assert known.digest(file).sha256 == trusted
        assert known.digest(file, reread=True).sha256 == _sha256(b"one")


@pytest.mark.usefixtures("old")
def test_threads_that_want_the_same_file_read_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"1" * LARGE)
    reads: list[int] = []
    read = hashlib.file_digest

    def counted(*arguments: object) -> object:
        reads.append(threading.get_ident())
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", counted)
    with HashMemo(tmp_path / "memo") as memo, ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(memo.digest, [file] * 16))) == 1
    assert len(reads) == 1


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    "damage", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 9]
)
def test_a_damaged_memo_is_replaced_and_one_that_cannot_be_is_done_without(
    tmp_path: Path, damage: bytes
) -> None:
    file, memo = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")), tmp_path / "memo"
    file.write_bytes(b"one")
    memo.write_bytes(damage)
    for place in (memo, memo, file / "below-a-file"):
        assert hash_files([file], place)[file].sha256 == _sha256(b"one")


def test_what_cannot_be_hashed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for bad in (tmp_path, tmp_path / "absent", tmp_path / "pipe"):
        with pytest.raises(InputFileError) as caught:
            hash_files([bad], tmp_path / "memo")
        assert caught.value.exit_code == 2


def test_many_processes_share_a_memo(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"f{number}").write_bytes(b"%d" % number)
    code = (
        "import sys; from pathlib import Path; from buildlib.cache import file_hashes as h;"
        "h._SETTLED_S = -1; p = Path(sys.argv[1]);"
        "print(len(h.hash_files(sorted(p.glob('f*')), p / 'memo')))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate(timeout=200)[0] for process in running] == [b"20\n"] * 3
