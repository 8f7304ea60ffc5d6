"""A real OpenSSH server for each test, which may break it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ssh_server import SshServer, running_ssh_server


@pytest.fixture
def ssh_server(tmp_path: Path, new_port: Callable[[], int]) -> Iterator[SshServer]:
    """A server of the test's own, reached as host `board` by its `config`."""
    folder = tmp_path / "ssh"
    folder.mkdir()
    with running_ssh_server(folder, new_port()) as server:
        yield server
