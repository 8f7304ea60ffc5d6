"""A journal of a test's own."""

import pytest

from tests.harness.plans.farm import HandJournal
from tests.harness.pool.conftest import two_devices

__all__ = ["two_devices"]


@pytest.fixture
def journal() -> HandJournal:
    return HandJournal()
