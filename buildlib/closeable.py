"""Objects that a `with` statement closes."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closeable(ABC):
    """Base class of owners of connections, threads or files; a `with` statement closes them."""

    @abstractmethod
    def close(self) -> None:
        """Close it; closing it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
