"""A wait that never ends fails once, and with it the rest of its file."""

import pytest

_TESTS = """
import pytest
from tests.waiting import patience_s, wait_for

@pytest.fixture
def device():
    yield
    assert patience_s() < 10
    print("a short farewell")

def test_first(device):
    wait_for(lambda: False, lambda: "no device", timeout_s=0.01)

def test_second(device):
    print("begun")
"""
_OTHERS = """
from tests.waiting import PATIENCE_S, patience_s

def test_fails():
    assert patience_s() == 0

def test_passes():
    assert patience_s() == PATIENCE_S
"""


def test_a_wait_in_vain_ends_its_file_at_once(pytester: pytest.Pytester) -> None:
    hooks = "pytest_runtest_makereport, pytest_runtest_setup"
    pytester.makeconftest(f"from tests.conftest import {hooks}")
    pytester.makepyfile(test_a=_TESTS, test_b=_OTHERS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=2, errors=1)
    said = result.stdout.str()
    assert "s: no device" in said
    assert "not run: test_first of the same file waited in vain" in said
    assert "a short farewell" in said
    assert "begun" not in said
