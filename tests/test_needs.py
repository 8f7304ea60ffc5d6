"""Needs that tests declare: what is missing skips them, and nothing else does."""

import pytest

from tests.system import needs
from tools.test import PACKAGES_VARIABLE

_TESTS = """
import pytest

@pytest.fixture
def unused():
    raise AssertionError("set up before the needs were looked at")

@pytest.mark.needs("mksh")
def test_declared(unused): ...

def test_undeclared():
    raise FileNotFoundError("No such file or directory: 'mksh'; the program `mksh`")
"""


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv(PACKAGES_VARIABLE, raising=False)


@pytest.mark.usefixtures("no_programs")
def test_a_declared_need_skips_and_another_fails(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = needs(*names)")
    pytester.makeconftest("from tests.conftest import pytest_runtest_setup")
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(skipped=1, failed=1)
    result.stdout.fnmatch_lines("SKIPPED*needs mksh: apt-get install mksh")


@pytest.mark.usefixtures("no_programs")
def test_a_missing_package_fails_where_all_were_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PACKAGES_VARIABLE, "installed")
    with pytest.raises(pytest.fail.Exception, match="apt-get install mksh"):
        needs("mksh")


def test_a_need_that_nobody_knows_fails() -> None:
    with pytest.raises(KeyError):
        needs("mkhs")
