"""Sidecars that others wrote or spoiled: one line about what is wrong, and never belief."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildlib.cache.file_hashes import HashMemo
from buildlib.cache.key import StageKey
from buildlib.cache.layout import FILES, SIDECAR
from buildlib.cache.records import find_problem, read_files, read_info
from buildlib.cache.store import StageCache
from buildlib.errors import CacheError

KEY = StageKey("compile", {"graphs": {"O": 3}, "ars": [1, 128]}, ("a" * 64,), {"qnn": "2"}, "c")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values),
    max_leaves=8,
)


@pytest.fixture
def memo(tmp_path: Path) -> Iterator[HashMemo]:
    with HashMemo(tmp_path / "memo") as memo:
        yield memo


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    with StageCache(tmp_path, "tiny") as cache:
        return cache.get_or_build(
            KEY, Path("m"), lambda folder: (folder / "part.bin").touch(), subject="part 1 of 1"
        ).folder


def test_records_are_read_as_they_were_written(entry: Path, memo: HashMemo) -> None:
    info, files = read_info(entry), read_files(entry)
    assert info.config == {"graphs": {"O": 3}, "ars": [1, 128]}
    assert info.hash == KEY.digest()
    assert (files.subject, files.versions, files.code_sha256) == ("part 1 of 1", {"qnn": "2"}, "c")
    assert list(files.files) == ["part.bin"]
    assert find_problem(entry, memo) is None


@given(name=st.sampled_from([SIDECAR, FILES]), noise=st.binary(max_size=80))
def test_noise_is_no_record(entry: Path, memo: HashMemo, name: str, noise: bytes) -> None:
    path = entry / name
    kept = path.read_bytes()
    path.write_bytes(noise)
    _one_line(find_problem(entry, memo))
    path.write_bytes(kept)
    assert find_problem(entry, memo) is None


@given(data=st.data(), value=json_values)
def test_a_field_that_was_changed_is_seen(
    entry: Path, memo: HashMemo, data: st.DataObject, value: object
) -> None:
    name = data.draw(st.sampled_from([SIDECAR, FILES]))
    path = entry / name
    kept = path.read_text()
    record: dict[str, Any] = json.loads(kept)
    told = {"operation", "config", "hash", "sources", "versions", "code_sha256", "files"}
    field = data.draw(st.sampled_from(sorted(told & set(record))))
    same = record[field] == value
    record[field] = value
    path.write_text(json.dumps(record))
    if not same:
        _one_line(find_problem(entry, memo))
    path.write_text(kept)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "{}", "[]", "null", '{"operation": "\\ud800"}', "\ufeff{}"],
)
def test_hostile_text_is_refused(entry: Path, text: str) -> None:
    (entry / SIDECAR).write_text(text)
    with pytest.raises(CacheError) as caught:
        read_info(entry)
    _one_line(str(caught.value))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(entry: Path, memo: HashMemo, number: str) -> None:
    path = entry / SIDECAR
    path.write_text(path.read_text().replace('"O": 3', f'"O": {number}'))
    _one_line(find_problem(entry, memo))


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "part.bin/..", "", "a\0b"])
def test_files_outside_are_never_looked_at(entry: Path, memo: HashMemo, name: str) -> None:
    path = entry / FILES
    record = json.loads(path.read_text())
    record["files"][name] = record["files"]["part.bin"]
    path.write_text(json.dumps(record))
    _one_line(find_problem(entry, memo))


def test_an_entry_under_another_name_is_not_believed(entry: Path, memo: HashMemo) -> None:
    moved = entry.rename(entry.with_name("compile_" + "0" * 32))
    _one_line(find_problem(moved, memo))


def _one_line(problem: str | None) -> None:
    assert problem
    assert problem.splitlines() == [problem]
