"""Every error of every package crosses processes, is one line, and stands in its package's tree."""

import inspect
import pickle
import types
import typing
from pathlib import Path

import pytest

import buildlib.errors
import harness.errors
import reports.errors
from buildlib.error_base import QnnfarmError, one_line
from harness.errors import DeviceConnectError, RunnerError, WrongUseError

ROOTS = (buildlib.errors.BuildError, harness.errors.HarnessError, reports.errors.ReportError)
TEXT = "a\nb\x1b[31m'\"ü"
SAMPLES: dict[object, object] = {str: TEXT, int: 3, float: 1.5, bool: True, Path: Path("/p\n\x1b")}


def below(kind: type[QnnfarmError]) -> list[type[QnnfarmError]]:
    """The subclasses in the kind's own package, parents first, in the order of the source."""
    package = kind.__module__.partition(".")[0]
    own = [k for k in kind.__subclasses__() if k.__module__.partition(".")[0] == package]
    return [each for child in own for each in (child, *below(child))]


def sample(annotation: object) -> object:
    """A value of a type, with texts that do not belong on one line."""
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return tuple(sample(a) for a in typing.get_args(annotation) if a is not ...)
    if origin in {typing.Union, types.UnionType}:
        return sample(typing.get_args(annotation)[0])
    return SAMPLES[annotation]


def arguments(kind: type[QnnfarmError]) -> dict[str, object]:
    """What to make an error of a kind with."""
    return {
        name: sample(parameter.annotation)
        for name, parameter in inspect.signature(kind).parameters.items()
    }


@pytest.mark.parametrize(
    "kind",
    [kind for root in ROOTS for kind in (root, *below(root))],
    ids=lambda kind: f"{kind.__module__.partition('.')[0]}-{kind.__name__}",
)
def test_it_survives_pickling_and_is_one_line(kind: type[QnnfarmError]) -> None:
    given = arguments(kind)
    error = kind(**given)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is kind
    assert copy.args == error.args == tuple(given.values()) == kind(*given.values()).args
    assert vars(copy) == vars(error)
    assert vars(error).items() >= given.items()
    assert str(copy) == str(error)
    assert kind.exit_code in {1, 2}
    assert str(error).isprintable()
    assert str(error) or below(kind)  # only a root is never raised itself


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
def test_the_tree_is_that_of_the_classes(root: type[QnnfarmError]) -> None:
    package = root.__module__.partition(".")[0]
    doc = (buildlib.errors, harness.errors, reports.errors)[ROOTS.index(root)].__doc__ or ""
    lines = [line for line in doc.splitlines() if line.split()[:1] and line.startswith("    ")]
    drawn, above = {}, {0: ""}
    for line in lines:
        depth = len(line) - len(line.lstrip())
        name = line.split()[0]
        above[depth] = name
        drawn[name] = above[max(d for d in above if d < depth and (d == 0 or d % 2 == 0))]
    assert drawn == {
        root.__name__: "",
        **{kind.__name__: kind.__bases__[0].__name__ for kind in below(root)},
    }, package


def test_errors_compare_and_hash_by_identity() -> None:
    error = WrongUseError("no")
    assert error != WrongUseError("no")
    assert len({error, WrongUseError("no")}) == 2


def test_long_texts_lose_their_middle() -> None:
    text = one_line("begin " + "x" * 500 + " end")
    assert text.startswith("begin ")
    assert text.endswith(" end")
    assert len(text) == 303
    long = str(DeviceConnectError("serial", "because " + "y" * 5000))
    assert len(long) < 1100


def test_a_runners_failure_is_told_with_the_librarys_own_errors() -> None:
    log = 'banner\n[ERROR] "no\x1b backend"\n[WARN] x\n[ERROR] "failed"\nit ended\n'
    said = str(RunnerError("R58", "genie-t2t-run", "ended with status 1", 1, log))
    assert said.endswith('[ERROR] "failed" | it ended')
    assert "no" in said.partition("it said: ")[2].partition(" | ")[0]
    assert said.isprintable()
    assert "it said" not in str(RunnerError("R58", "genie-t2t-run", "could not be started", 1, " "))
    assert str(RunnerError("R58", "x", "died", 1, "one\none")).endswith("it said: one")
