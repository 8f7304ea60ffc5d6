"""Every error of the harness crosses processes, is one line, and stands in the tree."""

import inspect
import pickle
import types
import typing
from pathlib import Path

import pytest

from harness import errors
from harness.errors import HarnessError

_TEXT = "a\nb\x1b[31m'\"ü"
_SAMPLES: dict[object, object] = {
    str: _TEXT, int: 3, float: 1.5, bool: True, object: _TEXT, Path: Path("/p"), bytes: b"\n",
}  # fmt: skip


def _all_errors() -> list[type[HarnessError]]:
    found = [HarnessError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return sorted({k for k in found if k.__module__ == errors.__name__}, key=lambda k: k.__name__)


def _sample(annotation: object) -> object:
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return tuple(_sample(a) for a in typing.get_args(annotation) if a is not ...)
    if origin in {typing.Union, types.UnionType}:
        return _sample(typing.get_args(annotation)[0])
    return _SAMPLES[annotation]


def _make(kind: type[HarnessError]) -> HarnessError:
    if "__init__" not in kind.__dict__ and kind.__init__ is Exception.__init__:
        return kind(_TEXT)
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    hints = typing.get_type_hints(kind.__init__)
    return kind(*(_sample(hints[p.name]) for p in parameters if p.kind not in kinds))


@pytest.mark.parametrize("kind", _all_errors(), ids=lambda kind: kind.__name__)
def test_it_survives_pickling(kind: type[HarnessError]) -> None:
    error = _make(kind)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is kind
    assert copy.args == error.args
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)
    assert kind.exit_code in {1, 2}


@pytest.mark.parametrize("kind", _all_errors(), ids=lambda kind: kind.__name__)
def test_it_stands_in_the_tree(kind: type[HarnessError]) -> None:
    assert f" {kind.__name__} " in (errors.__doc__ or "").replace("\n", " ")


@pytest.mark.parametrize(
    "kind",
    [k for k in _all_errors() if issubclass(k, errors.DeviceError | errors.AdbServerError)],
    ids=lambda kind: kind.__name__,
)
def test_what_a_device_said_stays_on_one_line(kind: type[HarnessError]) -> None:
    if kind is errors.DeviceError:
        return
    _, *rest = _make(kind).args
    error = kind("serial", *rest)
    assert str(error).isprintable()
