"""Hosts of a lab: a database that all share."""

from collections.abc import Iterator

import pytest

from tests.harness.results.conftest import postgresql
from tests.postgresql_server import PostgresqlServer
from tests.reports.conftest import browser

__all__ = ["browser", "postgresql"]


@pytest.fixture(scope="module")
def server(postgresql_server: PostgresqlServer) -> Iterator[PostgresqlServer]:
    postgresql_server.create("lab")
    yield postgresql_server
    postgresql_server.drop("lab")
