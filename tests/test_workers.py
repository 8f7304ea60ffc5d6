"""Workers that are forked: reports as of one process, and a worker that dies is named."""

import sys

import pytest

from tests.system import IMPORT_PATH

_TESTS = """
import os, pytest
print_of = {name!r}

@pytest.fixture(scope="session")
def worker(tmp_path_factory):
    yield tmp_path_factory.getbasetemp().name

def test_it_is_one_of_two(worker):
    print(print_of)
    assert os.environ["PYTEST_XDIST_WORKER"] == worker
    assert print_of != "b"

def test_it_ends(worker):
    if print_of == "c" and "DIES" in os.environ:
        os._exit(3)
"""


@pytest.mark.parametrize("dies", [False, True])
def test_files_are_run_by_workers(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)
    if dies:
        monkeypatch.setenv("DIES", "")
    pytester.makeconftest("pytest_plugins = ['tests.workers']")
    for name in "abc":
        pytester.makepyfile(**{f"test_{name}": _TESTS.format(name=name)})
    folder = pytester.path / "folder"
    shown = pytester.run(sys.executable, "-m", "pytest", "-n", "2", f"--basetemp={folder}")
    assert {path.name for path in folder.iterdir()} == {"gw0", "gw1"}
    assert shown.ret == pytest.ExitCode.TESTS_FAILED
    if dies:
        shown.stdout.fnmatch_lines(["*a worker ended with 3 in test_c.py::test_it_ends*"])
    else:
        shown.assert_outcomes(passed=5, failed=1)
        shown.stdout.fnmatch_lines(["*Captured stdout call*", "b", "FAILED test_b.py::*"])
