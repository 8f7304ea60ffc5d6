"""Errors that name the user's files where a stage worked on copies of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from buildlib.builder.sources import ModelSource, OnnxSource
from buildlib.errors import BuildError, EncodingsError


@contextmanager
def original_paths(
    source: ModelSource | None, copies: Mapping[Path, Path] | None = None
) -> Iterator[None]:
    """Let errors raised inside name the user's files, not a stage's copies of them.

    Args:
        source: of the model: an error about the encoding of a tensor names the file that it is in,
            or should be in.
        copies: files that vanish with the stage, and the names to give for them.
    """
    try:
        yield
    except BuildError as error:
        args = _in_terms_of(source, copies or {}, error)
        if args == error.args:
            raise
        same: Callable[..., BuildError] = type(error)
        raise same(*args) from error


def _in_terms_of(
    source: ModelSource | None, copies: Mapping[Path, Path], error: BuildError
) -> tuple[object, ...]:
    names = {str(copy): str(real) for copy, real in copies.items()}
    args = tuple(_renamed(arg, copies, names) for arg in error.args)
    if isinstance(error, EncodingsError) and isinstance(source, OnnxSource):
        file = str(source.encodings or source.model)
        if args[0] != file:
            return file, f"{error.subject}: {error.reason}"
    return args


def _renamed(value: object, paths: Mapping[Path, Path], names: Mapping[str, str]) -> object:
    if isinstance(value, Path):
        return paths.get(value, value)
    return names.get(value, value) if isinstance(value, str) else value
