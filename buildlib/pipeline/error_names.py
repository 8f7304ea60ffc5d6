"""Errors in terms of the user's files, where a stage worked on copies of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from buildlib.errors import BuildError, EncodingsError
from buildlib.pipeline.sources import ModelSource, OnnxSource


@contextmanager
def naming(source: ModelSource | None, copies: Mapping[Path, Path] | None = None) -> Iterator[None]:
    """Let errors name what is there when the stage is over.

    Args:
        source: what is built: an error about the encoding of a tensor says which of its files that
            is in, or should be.
        copies: files that go away with the stage, and what to call them.
    """
    try:
        yield
    except BuildError as error:
        args = _in_terms_of(source, copies or {}, error)
        if args == error.args:
            raise
        raise type(error)(*args) from error


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
