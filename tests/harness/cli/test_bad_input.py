"""What users see of a build that cannot be, or is ended: one line, and nothing half-written."""

import os
import re
from pathlib import Path

import pytest

from suites.models import tiny_llama
from tests.buildlib.model_folders import copy_of_export
from tests.command_line import Done, Started

SHAPE = ("--target", "SM8750:emulator", "--ar", "1,8", "--cl", "24", "--splits", "1")
NO_COMPILER = """
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] == "onnxruntime_qnn" else real(name, package)
)
"""
MAIN = """
from harness.cli.app import main
main()
"""
SMALL_DISK = """
import ctypes, os, subprocess, sys
user, group, call = os.geteuid(), os.getegid(), ctypes.CDLL(None, use_errno=True).unshare
assert not call(0x10020000), os.strerror(ctypes.get_errno())  # namespaces of users and mounts
for name, entry in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(entry)
place = sys.argv.pop(1)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "small", place], check=True)
os.mkdir(f"{place}/cache")
"""
FULL_DISK = """
import resource, sys
limit = 512 * int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return copy_of_export("aihub-llama", tmp_path / "model")


def command(model: Path, *more: str) -> list[str]:
    return ["build", str(model), *SHAPE, "--out", str(model.with_name("out")), *more]


def run(*words: str, cache: Path) -> Done:
    build = Started(*words, env=environment(cache))
    out, err = build.communicate(timeout=250)
    return Done(words, build.wait(), out, err)


def environment(cache: Path) -> dict[str, str]:
    return os.environ | {"QNNFARM_CACHE_DIR": str(cache)}


def unfinished(cache: Path) -> list[Path]:
    return [path for path in cache.glob("model/.*") if path.is_dir()]


@pytest.mark.needs("util-linux", "user-namespaces", "libatomic1")
@pytest.mark.parametrize("full", ["cache", "out"])
def test_a_disk_that_is_too_small_is_told_before_the_first_stage(full: str, tmp_path: Path) -> None:
    """In a mount namespace with a file system of 256 KiB; the user need not be root."""
    small = tmp_path / "small"
    small.mkdir()
    places = {"cache": tmp_path / "cache", "out": tmp_path / "out"} | {full: small / full}
    command = ["build", str(tiny_llama.folder()), "--target", "SM8750:emulator", "--ar", "1"]
    command += ["--cl", "64", "--out", str(places["out"])]
    done = run("-c", SMALL_DISK + MAIN, str(small), *command, cache=places["cache"])
    assert done.returncode != 0
    *before, said = done.stderr.splitlines()
    assert re.search("about [0-9]+ MiB are needed and 0 MiB free", said)
    assert not before


def test_a_machine_without_the_compiler(model: Path, tmp_path: Path) -> None:
    done = run("-c", NO_COMPILER + MAIN, *command(model), cache=tmp_path / "cache")
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert "onnxruntime-qnn is not installed" in error
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.needs("libatomic1")
@pytest.mark.parametrize("blocks", [40, pytest.param(120, marks=pytest.mark.variant)])
def test_a_full_disk(model: Path, tmp_path: Path, blocks: int) -> None:
    """No file gets longer than so many blocks of 512 bytes: the model, or the compiled graph."""
    cache = tmp_path / "cache"
    done = run("-c", FULL_DISK + MAIN, str(blocks), *command(model), cache=cache)
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"qnnfarm: cache {cache}/model/")
    assert "does not fit on the disk" in error
    assert not (tmp_path / "out").exists()
    assert unfinished(cache) == []
