"""A real OpenSSH server, which each test may break."""

from collections.abc import Callable, Iterator

import pytest

from plugins.ssh_devices.host import SshHost
from tests.plugins.ssh_devices.ssh_server import SshServer, running_ssh_server


@pytest.fixture(scope="session")
def _server(
    tmp_path_factory: pytest.TempPathFactory, new_port: Callable[[], int]
) -> Iterator[SshServer]:
    with running_ssh_server(tmp_path_factory.mktemp("ssh"), new_port()) as server:
        yield server


@pytest.fixture
def ssh_server(_server: SshServer) -> SshServer:
    """A server as it began, reached as host `board` by its `config`."""
    _server.restore()
    return _server


@pytest.fixture
def host(ssh_server: SshServer) -> Iterator[SshHost]:
    with SshHost.named("board", ssh_server.config) as host:
        yield host
