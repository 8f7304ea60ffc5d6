"""The profiles that Hypothesis runs under."""

import pytest
from hypothesis import settings


@pytest.mark.parametrize("name", ["suite", "new"])
def test_no_example_is_timed(name: str) -> None:
    assert settings.get_profile(name).deadline is None
    assert settings().deadline is None
