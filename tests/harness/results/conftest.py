"""Places for results on both engines, and sample records; the numbers are made up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.results.store import ResultsStore
from tests.harness.results.places import Place, PostgresqlPlace, SqlitePlace
from tests.postgresql_server import PostgresqlServer


@pytest.fixture
def postgresql(postgresql_server: PostgresqlServer) -> Iterator[PostgresqlPlace]:
    """An empty database of that server."""
    yield PostgresqlPlace(postgresql_server, "tests")
    postgresql_server.empty("tests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """PostgreSQL beside SQLite: always in files that try the statements alone, `BOTH_ENGINES`."""
    chosen = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "place" in metafunc.fixturenames and "place" not in chosen:
        marks = () if hasattr(metafunc.module, "BOTH_ENGINES") else pytest.mark.variant
        both = ["sqlite", pytest.param("postgresql", marks=marks)]
        metafunc.parametrize("place", both, indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where nothing is stored yet, on each engine."""
    if request.param == "sqlite":
        return SqlitePlace(tmp_path / "results.db")
    found: PostgresqlPlace = request.getfixturevalue("postgresql")
    return found


@pytest.fixture
def store(place: Place) -> Iterator[ResultsStore]:
    with ResultsStore.open(place.location) as opened:
        yield opened
