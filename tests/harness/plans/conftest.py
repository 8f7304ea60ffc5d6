"""A journal of a test's own, and a scheduler that looks often."""

import pytest

from harness.plans import scheduler
from tests.harness.plans.farm import HandJournal
from tests.harness.pool.conftest import two_devices

__all__ = ["two_devices"]


@pytest.fixture
def journal() -> HandJournal:
    return HandJournal()


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_TICK_S", 0.02)
