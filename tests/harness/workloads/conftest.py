"""Where the tests of workloads keep their runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.results.store import ResultsStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResultsStore]:
    with ResultsStore.open(tmp_path / "results.db") as opened:
        yield opened
