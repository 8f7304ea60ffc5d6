"""`qnnfarm cache` on entries that were really made, and spoiled."""

import json
import os
from pathlib import Path

import pytest

from buildlib.cache.key import StageKey
from buildlib.cache.layout import LAST_USED
from buildlib.cache.store import StageCache
from tests.harness.cli.conftest import Run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache of three entries; the first was last used two days ago, the second yesterday."""
    root = tmp_path / "root"
    with StageCache(root, "tiny") as cache:
        for number in range(3):

            def fill(folder: Path, size: int = 1000 * (number + 1)) -> None:
                (folder / "part.bin").write_bytes(bytes(size))

            key = StageKey("compile", {"graphs": {"O": number}}, ("a" * 64,), {"qnn_build": "v2"})
            subject = f"part {number}"
            folder = cache.get_or_build(key, Path("m.dlc"), fill, subject=subject).folder
            used = (folder / LAST_USED).stat().st_mtime - 86400 * (2 - number)
            os.utime(folder / LAST_USED, (used, used))
    return root


def entries(qnnfarm: Run, root: Path) -> list[dict[str, object]]:
    listed = json.loads(qnnfarm("cache", "ls", "--cache", root, "--json").stdout)
    found: list[dict[str, object]] = listed["entries"]
    return found


def test_entries_are_listed_and_shown(qnnfarm: Run, root: Path) -> None:
    rows = entries(qnnfarm, root)
    assert [row["subject"] for row in rows] == ["part 2", "part 1", "part 0"]
    listed = qnnfarm("cache", "ls", QNNFARM_CACHE_DIR=str(root)).stdout
    assert "2 d ago" in listed
    assert "3 entries" in listed
    name = str(rows[0]["name"]).rpartition("/")[2]
    shown = json.loads(qnnfarm("cache", "show", name[:16], "--cache", root, "--json").stdout)
    assert shown["config"] == {"graphs": {"O": 2}}
    assert shown["files"]["part.bin"]["size_bytes"] == 3000
    text = qnnfarm("cache", "show", name, "--cache", root).stdout
    assert 'graphs = {"O": 2}' in text
    assert "qnn_build" in text
    several = qnnfarm("cache", "show", "compile", "--cache", root)
    assert (several.returncode, "means 3 entries" in several.stderr) == (2, True)


def test_an_empty_cache_is_no_error(qnnfarm: Run, tmp_path: Path) -> None:
    empty = str(tmp_path / "none")
    for command in ("ls", "verify", "prune"):
        done = qnnfarm("cache", command, QNNFARM_CACHE_DIR=empty)
        assert (done.returncode, done.stderr) == (0, "")


def test_damage_is_named_and_repaired(qnnfarm: Run, root: Path) -> None:
    assert qnnfarm("cache", "verify", "--cache", root).returncode == 0
    spoiled = next(root.rglob("part.bin"))
    data = bytearray(spoiled.read_bytes())
    data[500] ^= 1
    spoiled.write_bytes(data)
    found = qnnfarm("cache", "verify", "--cache", root)
    assert found.returncode == 1
    assert f"{spoiled.parent.name}: part.bin has changed" in found.stdout
    repaired = qnnfarm("cache", "verify", "--repair", "--cache", root, "--json")
    assert repaired.returncode == 0
    (damaged,) = json.loads(repaired.stdout)["damaged"]
    assert damaged["removed"] is True
    assert not spoiled.exists()
    assert "2 of 2 entries" in qnnfarm("cache", "verify", "--cache", root).stdout


def test_prune_removes_by_age_and_size(qnnfarm: Run, root: Path) -> None:
    prune = ("cache", "prune", "--cache", root)
    play = json.loads(qnnfarm(*prune, "--all", "--dry-run", "--json").stdout)
    assert len(play["removed"]) == 3
    assert "removed 0 entries" in qnnfarm(*prune).stdout
    assert "removed 1 entry" in qnnfarm(*prune, "--older-than", "36h").stdout
    assert [row["subject"] for row in entries(qnnfarm, root)] == ["part 2", "part 1"]
    assert "removed 1 entry" in qnnfarm(*prune, "--to", "5kB").stdout
    assert [row["subject"] for row in entries(qnnfarm, root)] == ["part 2"]
    assert "removed 1 entry" in qnnfarm(*prune, QNNFARM_CACHE_LIMIT="0").stdout
    assert entries(qnnfarm, root) == []
