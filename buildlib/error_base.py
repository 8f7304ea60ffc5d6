"""Root of the errors of all packages."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar, dataclass_transform

_LONGEST = 1000
_MOST_READ = 64 * 1024
_MOST_ITEMS = 50


def one_line(text: str, limit: int = 300) -> str:
    """Put text from outside on one line, with control characters as spaces.

    Longer text loses its middle: the beginning names the step, the end the result.
    """
    if len(text) > 2 * _MOST_READ:
        text = f"{text[:_MOST_READ]} … {text[-_MOST_READ:]}"
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    head = limit // 3
    return flat if len(flat) <= limit else f"{flat[:head]} … {flat[head - limit :]}"


def nearest_names(
    given: str, known: Iterable[str], count: int = 1, *, least: float = 0.6
) -> list[str]:
    """Return the names nearest to a misspelt one, in any case; with the same letters come first.

    Args:
        least: likeness from which a name is near, from 0 to 1.
    """
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(given.lower(), by_lower, max(len(by_lower), 1), least)
    near.sort(key=lambda name: sorted(name) != sorted(given.lower()))
    return [by_lower[name] for name in near[:count]]


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class QnnfarmError(Exception):
    """Root of every error that the project raises on purpose.

    Each subclass becomes a dataclass: it declares its fields, and `template`, the format string of
    its message. Each text that the template inserts is put on one line, of at most 1000
    characters or as many as the format spec says (`{command:120}`, `{name!r:80}`); a tuple is
    joined with commas.
    A message that depends on the data is a `__str__` that fills one of several templates.

    All arguments are in `args`, in the order of the constructor, so every error can be pickled.
    A class with an `__init__` of its own names them in `__match_args__`.

    Attributes:
        exit_code: of the command line: 2 means that there is no answer, 1 that the answer is bad.
    """

    __match_args__: ClassVar[tuple[str, ...]] = ()
    template: ClassVar[str] = ""
    exit_code: ClassVar[int] = 2

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        self.args = tuple(getattr(self, name) for name in self.__match_args__)

    def __str__(self) -> str:
        return self._fill(self.template)

    def _fill(self, template: str, **more: object) -> str:
        """Insert the attributes, and `more` values, into a template."""
        values = {**vars(self), **more}
        return template.format_map({name: _printable(value) for name, value in values.items()})


class _Text(str):
    """Text that is formatted as one line."""

    __slots__ = ()

    def __repr__(self) -> "_Text":
        return _Text(super().__repr__())

    def __format__(self, limit: str) -> str:
        return one_line(self, int(limit or _LONGEST))


def _printable(value: object) -> object:
    if isinstance(value, str | Path):
        return _Text(value)
    if isinstance(value, tuple):
        return ", ".join(one_line(str(item)) for item in value[:_MOST_ITEMS]) + (
            f" and {len(value) - _MOST_ITEMS} more" if len(value) > _MOST_ITEMS else ""
        )
    return value
