"""The package of docs/plugins.md, installed and used as users do."""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from tests.command_line import Done, qnnfarm

DOCUMENT = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with that of the document, as pip leaves it."""
    place = tmp_path_factory.mktemp("site-packages")
    (place / "stopwatch.py").write_text(block("python"))
    project = tomllib.loads(block("toml"))["project"]
    info = place / "stopwatch-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stopwatch\nVersion: 1\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return place


def run(installed: Path, folder: Path, *arguments: str | Path) -> Done:
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "COLUMNS": "120"}
    return qnnfarm(*arguments, cwd=folder, env=environment)


def test_its_command_runs(installed: Path, tmp_path: Path) -> None:
    assert run(installed, tmp_path, "started", "--name", "mine").stdout == "mine runs\n"


def test_its_notes_are_imported(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("stopwatch phone-3 41.5\nstopwatch phone-4 39.0\n")
    done = run(installed, tmp_path, "results", "import", "notes.txt", "--db", "r.db", "--json")
    (found,) = json.loads(done.stdout)["files"]
    assert (found["tool"], len(found["runs"])) == ("stopwatch", 2)


def test_its_runtime_is_measured_on_a_device(
    installed: Path, adb_environment: Path, tmp_path: Path
) -> None:
    (tmp_path / "build").mkdir()
    program = tmp_path / "build" / "stopwatch"
    program.write_text('#!/bin/sh\necho "$(($1 * 2)) $2"\n')
    program.chmod(0o755)
    (tmp_path / "model").write_text("weights")
    (tmp_path / "stopwatch.yaml").write_text("runtime: stopwatch\nmodel: model\nbuild: build\n")
    words = ["stopwatch.yaml", "--runtime", "stopwatch", "--device", "local", "--json"]
    done = run(installed, tmp_path, "bench", *words, "-p", "64", "-n", "16", "--db", "r.db")
    assert done.returncode == 0, done.stderr
    assert "128" in done.stdout
