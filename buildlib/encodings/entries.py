"""From what a file says of one tensor to its `Encoding`, with errors that name the tensor."""

from collections.abc import Callable

from pydantic import ValidationError

from buildlib.encodings.fields import Json, MalformedError, field, shown
from buildlib.encodings.model import Encoding


def read_entry(entry: object, grid: Callable[[Json], Json]) -> Encoding:
    """One encoding of a list; `grid` reads all of it but the name.

    Raises:
        MalformedError: it is none.
    """
    if not isinstance(entry, dict):
        raise MalformedError(f"an encoding is {shown(entry)}")
    return named(field(entry, "name", str), lambda: grid(entry))


def named(name: str, grid: Callable[[], Json]) -> Encoding:
    """The encoding of a tensor.

    Raises:
        MalformedError: its fields make no sense.
    """
    try:
        return Encoding(name=name, **grid())
    except ValidationError as error:
        raise MalformedError(f"{shown(name)}: {_fault(error)}") from error
    except MalformedError as error:
        raise MalformedError(f"{shown(name)}: {error}") from error


def _fault(error: ValidationError) -> str:
    """What is wrong with one encoding."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    said = str(first["msg"]).removeprefix("Value error, ")
    return f"{where}: {said}" if where else said
