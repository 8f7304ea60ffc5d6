"""What goes, what stays, and what a running build keeps."""

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from buildlib.cache.entries import EntryUsage, disk_usage, prune
from buildlib.cache.finished_builds import FinishedBuild, find_finished, remember_finished
from buildlib.cache.key import StageKey
from buildlib.cache.layout import FINISHED, LAST_USED, entry_folders
from buildlib.cache.store import StageCache
from buildlib.errors import InvalidOptionError
from buildlib.sizes import parse_age, parse_size, size_text

Make = Callable[..., Path]


def key(number: int) -> StageKey:
    return StageKey("arcl", {"n": number}, ())


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(number, age_s, size)`: an entry last used so many seconds ago."""

    def entry(number: int, age_s: float, size: int = 1000) -> Path:
        def fill(folder: Path) -> None:
            (folder / "data").write_bytes(bytes(size))

        with StageCache(tmp_path, "tiny") as cache:
            folder = cache.get_or_build(key(number), Path("m"), fill).folder
        used = (folder / LAST_USED).stat().st_mtime - age_s
        os.utime(folder / LAST_USED, (used, used))
        return folder

    return entry


def test_the_least_recently_used_go_until_it_fits(make: Make, tmp_path: Path) -> None:
    old, older, new = make(1, 200), make(2, 300), make(3, 100)
    one = EntryUsage.of(new).size_bytes
    pruned = prune(tmp_path, to_bytes=2 * one)
    assert [usage.folder for usage in pruned.removed] == [older]
    assert (pruned.freed_bytes, pruned.left_bytes) == (one, 2 * one)
    assert list(entry_folders(tmp_path)) == sorted([old, new])


def test_by_age_all_and_in_play(make: Make, tmp_path: Path) -> None:
    old, new = make(1, 7200), make(2, 60)
    assert [u.folder for u in prune(tmp_path, everything=True, dry_run=True).removed] == [old, new]
    assert [u.folder for u in prune(tmp_path, older_than=timedelta(hours=1)).removed] == [old]
    assert [u.folder for u in prune(tmp_path, everything=True).removed] == [new]
    assert list(entry_folders(tmp_path)) == []


def test_records_of_finished_builds_go_with_their_entries(make: Make, tmp_path: Path) -> None:
    old, new = make(1, 7200), make(2, 60)
    for name, entries in {"both": [old, new], "new": [new], "unused": [new]}.items():
        finished = FinishedBuild.of(tmp_path, [], [], [], entries, [name])
        remember_finished(tmp_path, {"name": name}, finished)
    (unused,) = (p for p in (tmp_path / FINISHED).iterdir() if '["unused"]' in p.read_text())
    (tmp_path / FINISHED / "torn.json").write_text("{")

    def kept() -> set[str]:
        texts = [path.read_text() for path in (tmp_path / FINISHED).iterdir()]
        return {name for name in ("both", "new", "unused", "{") for t in texts if name in t[-20:]}

    prune(tmp_path, to_bytes=EntryUsage.of(new).size_bytes, dry_run=True)
    assert kept() == {"both", "new", "unused", "{"}
    prune(tmp_path, to_bytes=EntryUsage.of(new).size_bytes)
    assert kept() == {"new", "unused"}
    os.utime(unused, (1, 1))
    assert find_finished(tmp_path, {"name": "new"}) is not None  # which counts as a use
    prune(tmp_path, older_than=timedelta(hours=1))
    assert kept() == {"new"}
    prune(tmp_path, everything=True)
    assert kept() == set()


def test_a_clock_that_was_wrong_keeps_no_entry_for_ever(make: Make, tmp_path: Path) -> None:
    future, old = make(1, -10 * 365 * 86400), make(2, 100)
    assert prune(tmp_path).removed == ()
    new = make(3, -60)
    one = EntryUsage.of(new).size_bytes
    removed = prune(tmp_path, to_bytes=one).removed
    assert [usage.folder for usage in removed] == [old, future]


def test_shared_files_count_once(make: Make, tmp_path: Path) -> None:
    first = make(1, 20, 50_000)
    with StageCache(tmp_path, "tiny") as cache:
        cache.get_or_build(
            key(2), Path("m"), lambda folder: (folder / "data").hardlink_to(first / "data")
        )
    usages = [EntryUsage.of(folder) for folder in entry_folders(tmp_path)]
    assert sum(usage.size_bytes for usage in usages) > 100_000
    assert 50_000 < disk_usage(usages) < 60_000
    pruned = prune(tmp_path, to_bytes=50_100)  # the first alone frees next to nothing
    assert len(pruned.removed) == 2
    assert pruned.left_bytes == 0


@pytest.mark.parametrize("model", ["tiny", "two\nlines"])
def test_entries_of_a_running_build_stay(make: Make, tmp_path: Path, model: str) -> None:
    other = make(2, 50)
    with StageCache(tmp_path, model) as running:
        folder = running.get_or_build(key(1), Path("m"), lambda _: None).folder
        pruned = prune(tmp_path, everything=True)
        assert [usage.folder for usage in pruned.removed] == [other]
        assert [usage.folder for usage in pruned.in_use] == [folder]
    assert [usage.folder for usage in prune(tmp_path, everything=True).removed] == [folder]


def test_a_build_of_another_process_keeps_what_it_uses_until_it_dies(
    make: Make, tmp_path: Path
) -> None:
    folder = make(1, 100)
    code = (
        "import sys; from pathlib import Path;"
        "from buildlib.cache.key import StageKey; from buildlib.cache.store import StageCache;"
        "cache = StageCache(Path(sys.argv[1]), 'tiny');"
        "cache.get_or_build(StageKey('arcl', {'n': 1}, ()), Path('m'), None);"
        "print('using', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"using\n"
        assert [usage.folder for usage in prune(tmp_path, everything=True).in_use] == [folder]
        child.kill()
        child.wait()
        assert [usage.folder for usage in prune(tmp_path, everything=True).removed] == [folder]
    assert list((tmp_path / ".builds").iterdir()) == []


def test_a_limit_is_kept_while_building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNNFARM_CACHE_LIMIT", "250kB")

    def fill(folder: Path) -> None:
        (folder / "data").write_bytes(bytes(100_000))

    for number in range(5):
        with StageCache(tmp_path, "tiny") as cache:
            cache.get_or_build(key(number), Path("m"), fill)
    assert len(list(entry_folders(tmp_path))) == 2
    with StageCache(tmp_path, "tiny") as cache:
        for number in range(10, 15):
            cache.get_or_build(key(number), Path("m"), fill)
        assert len(list(entry_folders(tmp_path))) == 5  # a build keeps what it made


def test_a_limit_from_the_environment(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNNFARM_CACHE_LIMIT", "1kB")
    make(1, 100)
    new = make(2, 0)
    assert list(entry_folders(tmp_path)) == [new]
    monkeypatch.setenv("QNNFARM_CACHE_LIMIT", "much")
    with pytest.raises(InvalidOptionError, match="QNNFARM_CACHE_LIMIT"):
        make(3, 0)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("50GB", 50 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("10k", 10_000),
        ("7", 7),
        ("0B", 0),
        ("5Gi", 5 << 30),
        *((text, None) for text in ("", "GB", "-1GB", "1iB", "1e9", "10XB", "1 0")),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int | None) -> None:
    if size is not None:
        assert parse_size(text, "limit") == size
    else:
        with pytest.raises(InvalidOptionError, match="limit"):
            parse_size(text, "limit")


def test_ages_as_people_write_them_and_sizes_for_them() -> None:
    assert parse_age("30d", "age") == timedelta(days=30)
    assert parse_age("1.5h", "age") == timedelta(minutes=90)
    for text in ("", "30", "d", "-1d", "9" * 30 + "w"):
        with pytest.raises(InvalidOptionError, match="age"):
            parse_age(text, "age")
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_999: "1.0 MB", 6_012_345_678: "6.0 GB"}
    assert {size: size_text(size) for size in sizes} == sizes
