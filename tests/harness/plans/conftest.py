"""A journal of a test's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.plans.journal import Journal
from tests.harness.pool.conftest import two_devices

__all__ = ["two_devices"]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "plan.jsonl") as journal:
        journal.begin("plan", "0" * 32, fresh=False)
        yield journal
