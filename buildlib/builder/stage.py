"""`CachedStage`: the declarations of every stage of a build."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from buildlib.cache.key import combined_sha256
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.layout import MODEL_FILE


class CachedStage(ABC):
    """One step from the model folder to the container, kept in the cache under its key.

    A stage is a frozen dataclass in a module of its own in `buildlib.builder.stages`. Its key is
    over all of its declarations, and over the code of its `modules` with all that they import.
    A field of `CacheEntry` is the output of another stage, and a field `files` maps the names of
    the user's files that it reads to their SHA-256.

    Attributes:
        operation: lower-case word that begins the name of its cache entry.
        compiles: whether the toolchain decides the output, so that its versions and its code
            belong to the key.
    """

    operation: ClassVar[str]
    compiles: ClassVar[bool] = False

    @property
    @abstractmethod
    def subject(self) -> str:
        """Graph or part that it handles, such as `ar32_cl192_1_of_2`."""

    @property
    def source(self) -> Path:
        """The file or folder it starts from, named in the sidecar for people to read.

        By default the model that the first of its inputs made.
        """
        return next(self.entries()).folder / MODEL_FILE

    @property
    @abstractmethod
    def options(self) -> Mapping[str, object]:
        """The options that decide its output."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """SHA-256 of all that it reads: the keys of other stages by field, and its `files`."""
        files = vars(self).get("files")
        own = () if files is None else (combined_sha256(files),)
        return (*(entry.hash for entry in self.entries()), *own)

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules whose code decides its output: its own, and those of plugins that it uses.

        A field may be an object of a plugin.
        """
        return tuple(dict.fromkeys(type(each).__module__ for each in (self, *vars(self).values())))

    def entries(self) -> Iterator[CacheEntry]:
        """Yield the outputs of other stages among its fields."""
        return _entries(vars(self))

    @abstractmethod
    def run(self, folder: Path) -> None:
        """Fill an empty folder with the output."""


def _entries(value: object) -> Iterator[CacheEntry]:
    match value:
        case CacheEntry():
            yield value
        case Mapping():
            for one in value.values():
                yield from _entries(one)
        case list() | tuple():
            for one in value:
                yield from _entries(one)
