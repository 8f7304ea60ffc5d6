"""Every error of the harness crosses processes, is one line, and stands in the tree."""

import pytest

from harness import errors
from harness.errors import HarnessError, RunnerError
from tests.error_samples import all_errors, make, survives_pickling


@pytest.mark.parametrize("kind", all_errors(HarnessError), ids=lambda kind: kind.__name__)
def test_it_survives_pickling(kind: type[HarnessError]) -> None:
    assert survives_pickling(kind)
    assert kind.exit_code in {1, 2}


@pytest.mark.parametrize("kind", all_errors(HarnessError), ids=lambda kind: kind.__name__)
def test_it_stands_in_the_tree(kind: type[HarnessError]) -> None:
    assert f" {kind.__name__} " in (errors.__doc__ or "").replace("\n", " ")


@pytest.mark.parametrize(
    "kind",
    [
        k
        for k in all_errors(HarnessError)
        if issubclass(k, errors.DeviceError | errors.AdbServerError)
    ],
    ids=lambda kind: kind.__name__,
)
def test_what_a_device_said_stays_on_one_line(kind: type[HarnessError]) -> None:
    if kind is errors.DeviceError:
        return
    _, *rest = make(kind).args
    error = kind("serial", *rest)
    assert str(error).isprintable()


def test_a_runners_failure_is_told_with_the_librarys_own_errors() -> None:
    log = 'banner\n[ERROR] "no\x1b backend"\n[WARN] x\n[ERROR] "failed"\nit ended\n'
    said = str(RunnerError("R58", "genie-t2t-run", "ended with status 1", 1, log))
    assert said.endswith('[ERROR] "failed" | it ended')
    assert "no" in said.partition("it said: ")[2].partition(" | ")[0]
    assert said.isprintable()
    assert "it said" not in str(RunnerError("R58", "genie-t2t-run", "could not be started", 1, " "))
    assert str(RunnerError("R58", "x", "died", 1, "one\none")).endswith("it said: one")
