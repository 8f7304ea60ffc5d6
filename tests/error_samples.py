"""Every error of a package, and one of each kind with hostile texts in it."""

import inspect
import pickle
import types
import typing
from pathlib import Path

_TEXT = "a\nb\x1b[31m'\"ü"
_SAMPLES: dict[object, object] = {
    str: _TEXT, int: 3, float: 1.5, bool: True, object: _TEXT, Path: Path("/p"), bytes: b"\n",
}  # fmt: skip

Kind = typing.TypeVar("Kind", bound=Exception)


def all_errors(root: type[Kind]) -> list[type[Kind]]:
    """The root and all below it in its package, by name."""
    found = [root]
    for kind in found:
        found.extend(kind.__subclasses__())
    package = root.__module__.partition(".")[0]
    own = {k for k in found if k.__module__.partition(".")[0] == package}
    return sorted(own, key=lambda k: k.__name__)


def make(kind: type[Kind]) -> Kind:
    """An error of a kind."""
    if "__init__" not in kind.__dict__ and kind.__init__ is Exception.__init__:
        return kind(_TEXT)
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    hints = typing.get_type_hints(kind.__init__)
    return kind(*(_sample(hints[p.name]) for p in parameters if p.kind not in kinds))


def survives_pickling(kind: type[Exception]) -> bool:
    """Whether an error crosses a process with all that it says."""
    error = make(kind)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    same = copy.args == error.args and vars(copy) == vars(error) and str(copy) == str(error)
    return same and type(copy) is kind


def _sample(annotation: object) -> object:
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return tuple(_sample(a) for a in typing.get_args(annotation) if a is not ...)
    if origin in {typing.Union, types.UnionType}:
        return _sample(typing.get_args(annotation)[0])
    return _SAMPLES[annotation]
