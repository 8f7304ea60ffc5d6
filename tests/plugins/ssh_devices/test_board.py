"""A Linux board with the real arm64 libraries, up to the tensor processor that is not there.

The board is a real OpenSSH server on this machine whose Python is Debian's for arm64, under qemu's
user mode; Genie and QNN are those of the wheel for aarch64. `make board` gets both, and runs this.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from suites.models import tiny_llama
from tests.harness.cli.conftest import Run
from tests.plugins.ssh_devices.ssh_server import running_ssh_server

pytestmark = pytest.mark.slow
_ROOT = "QNNFARM_ARM64_ROOT"


@pytest.fixture
def home(tmp_path: Path, new_port: Callable[[], int]) -> Iterator[Path]:
    """The home folder of a user whose configuration for SSH knows the board."""
    root, qemu = os.environ.get(_ROOT), shutil.which("qemu-aarch64-static")
    if root is None or qemu is None:
        pytest.fail(f"run by `make board`, which sets {_ROOT} and needs qemu-user-static")
    tools, home = tmp_path / "tools", tmp_path / "home"
    tools.mkdir()
    (home / ".ssh").mkdir(parents=True)
    python = f'exec {qemu} -L {root} {root}/usr/bin/python3 "$@"'
    uname = 'if [ "$1" = -m ]; then echo aarch64; else exec /bin/uname "$@"; fi'
    for name, line in {"python3": python, "uname": uname}.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    on_board = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(home)}
    with running_ssh_server(home / ".ssh", new_port(), on_board):
        yield home


def test_genie_for_arm64_reads_the_container_and_asks_for_the_processor(
    qnnfarm: Run, home: Path, tmp_path: Path
) -> None:
    container = tmp_path / "container"
    shape = ("--target", "QCS9075", "--ar", "1,32", "--cl", "192", "--splits", "2")
    built = qnnfarm("build", tiny_llama.folder(), *shape, "--out", container)
    assert built.returncode == 0, built.stderr
    environment = {"HOME": str(home), "QNNFARM_CACHE_DIR": os.environ["QNNFARM_CACHE_DIR"]}
    query = ("generate", container, "--device", "linux:board", "--prompt", "In the beginning")

    refused = qnnfarm(*query, **environment)
    assert refused.returncode == 2
    assert "`qnnfarm libraries fetch` gets it from PyPI" in refused.stderr
    fetched = qnnfarm("libraries", "fetch", **environment)
    assert fetched.returncode == 0, fetched.stderr
    rows = json.loads(
        qnnfarm("libraries", "ls", "--soc", "QCS9075", "--json", **environment).stdout
    )
    assert [row["abi"] for row in rows if "origin" in row] == ["x86_64", "aarch64"]

    done = qnnfarm(*query, **environment)
    assert done.returncode == 1
    assert "genie_t2t_run.py ended with status 1" in done.stderr
    assert '[ERROR] "Qnn initializeBackend FAILED!"' in done.stderr
    assert "GenieDialog_create failed" in done.stderr
    assert len(done.stderr.splitlines()) == 1
