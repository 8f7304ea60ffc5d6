"""Hosts of a lab: a database that all share, and a machine that SSH reaches."""

from collections.abc import Callable, Iterator

import pytest

from tests.postgresql_server import PostgresqlServer
from tests.ssh_server import SshServer, running_ssh_server


@pytest.fixture(scope="module")
def server(postgresql_server: PostgresqlServer) -> Iterator[PostgresqlServer]:
    """A server with an empty database `lab`."""
    postgresql_server.create("lab")
    yield postgresql_server
    postgresql_server.drop("lab")


@pytest.fixture(scope="module")
def ssh_server(
    tmp_path_factory: pytest.TempPathFactory, new_port: Callable[[], int]
) -> Iterator[SshServer]:
    """Every other host, reached as `board`."""
    with running_ssh_server(tmp_path_factory.mktemp("ssh"), new_port()) as server:
        yield server
