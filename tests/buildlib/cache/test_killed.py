"""Builds that kill themselves: the cache stays sound.

`test_killed.py STRIDE ROOT SEED` kills a build at its first call that changes something, and that
of each STRIDE behind it, and prints how often it did. After each, what the cache takes for whole
must be right, and the next build must find or make everything and leave nothing behind.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from buildlib.cache.entries import prune
from buildlib.cache.file_hashes import HashMemo
from buildlib.cache.key import StageKey
from buildlib.cache.layout import entry_folders, leftovers, model_folders
from buildlib.cache.records import find_problem
from buildlib.cache.store import StageCache

_MEMORY = Path("/dev/shm")  # noqa: S108 - a disk takes minutes for thousands of fsyncs
WEIGHTS = "weights"
ENTRIES = 2


def content(number: int) -> bytes:
    """What the stage of a number writes."""
    return bytes([number + 1]) * (30_000 + number)


def build(root: Path, number: int) -> Path:
    """One stage: a file in two writes, one in a sub-folder, and a link to the weights."""

    def fill(folder: Path) -> None:
        with (folder / "part.bin").open("wb") as file:
            file.write(content(number)[:10_000])
            file.flush()
            file.write(content(number)[10_000:])
        (folder / "sub").mkdir()
        (folder / "sub" / "config.json").write_text(str(number))
        (folder / WEIGHTS).hardlink_to(root.with_name(WEIGHTS))

    with StageCache(root, "tiny") as cache:
        return cache.get_or_build(StageKey("arcl", {"n": number}, ()), Path("m"), fill).folder


def scenario(root: Path, seed: int) -> None:
    """Builds some entries, spoils one, and keeps to a limit."""
    order = list(range(ENTRIES))
    random.Random(seed).shuffle(order)  # noqa: S311 - repeatable
    for number in order:
        folder = build(root, number)
        if number == order[0]:
            (folder / "part.bin").write_bytes(content(9)[: 30_000 + number])
            build(root, number)
    prune(root, to_bytes=120_000)


def check(root: Path) -> None:
    """What looks whole is right; the next build makes the rest and leaves nothing behind."""
    with HashMemo(root / "hashes.sqlite") as memo:
        for folder in entry_folders(root):
            number = next(n for n in range(ENTRIES) if folder.name.endswith(key_name(n)))
            if find_problem(folder, memo) is None:
                right = (folder / "part.bin").read_bytes() == content(number)
                right &= (folder / "sub" / "config.json").read_text() == str(number)
                assert right, f"{folder} looks whole and is not"
    for number in range(ENTRIES):
        assert (build(root, number) / "part.bin").read_bytes() == content(number)
    pruned = prune(root)
    assert not pruned.leftovers, "a build had left what the next one did not remove"
    for model in model_folders(root):
        assert not list(leftovers(model))
    assert not list((root / ".builds").iterdir())


def key_name(number: int) -> str:
    """The hash in the name of an entry."""
    return StageKey("arcl", {"n": number}, ()).digest()[:32]


def changes(event: str, arguments: tuple[object, ...]) -> bool:
    """Return whether a call can leave the disk or a lock as it was not before; reading cannot."""
    if event == "open":
        flags = arguments[2]
        return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if event in {"os.scandir", "os.listdir", "os.walk", "os.fwalk"}:
        return False
    return event.startswith(("os.", "shutil.", "fcntl.", "sqlite3."))


def killed_at(step: int, root: Path, seed: int) -> bool:
    """Build in a child that kills itself at such a call; return whether it came to that."""
    child = os.fork()
    if child == 0:
        calls = 0

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal calls
            calls += changes(event, arguments)
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            scenario(root, seed)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("stride", "at_least"),
    [
        pytest.param(1, 100, marks=pytest.mark.slow, id="steps"),
        pytest.param(11, 12, id="few"),
    ],
)
def test_a_killed_build_leaves_nothing_that_looks_whole(stride: int, at_least: int) -> None:
    in_memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        command = [sys.executable, __file__, str(stride), f"{folder}/root", "7"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= at_least


def main() -> None:
    """Runs what the arguments say."""
    stride, root, seed = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    root.with_name(WEIGHTS).write_bytes(bytes(100_000))
    kills = 0
    while killed_at(1 + kills * stride, root, seed):
        kills += 1
        check(root)
        shutil.rmtree(root)
    check(root)
    sys.stdout.write(f"{kills}\n")


if __name__ == "__main__":
    main()
