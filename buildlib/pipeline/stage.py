"""`Stage`: what every stage of a build declares of itself."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar


class Stage(ABC):
    """One step from the model folder to the container, kept in the cache by what decides it.

    A stage is a frozen dataclass in a module of its own in `buildlib.pipeline.stages`. Its key is
    over everything that it declares here, and over the code of its module with all that it imports.

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
    @abstractmethod
    def source(self) -> Path:
        """The file or folder it starts from, named in the sidecar for people to read."""

    @property
    @abstractmethod
    def options(self) -> Mapping[str, object]:
        """The options that decide its output."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """SHA-256 of everything that it reads, in a fixed order."""

    @abstractmethod
    def run(self, folder: Path) -> None:
        """Fill an empty folder with the output."""
