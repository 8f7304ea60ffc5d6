"""Every error of the harness crosses processes, is one line, and stands in the tree."""

import pytest

from harness import errors
from harness.errors import HarnessError
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
