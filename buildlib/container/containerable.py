"""`GenAIContainerable`: what can be loaded from a folder with a `metadata.json`.

Documented as `GenAIContainerable.load(path)`, docs.qualcomm.com 80-87189-2
(`qairt-gen-ai-api-gen-ai-builder-containers`).
"""

from os import PathLike
from pathlib import Path
from typing import Self

from buildlib.container.manifest import ContainerMetadata


class GenAIContainerable:
    """Base of the containers; its `load` gives the kind of container that the folder holds."""

    path: Path
    metadata: ContainerMetadata

    @classmethod
    def load(cls, path: str | PathLike[str], *, verify: bool = True) -> Self:
        """Open whichever container a folder holds.

        Args:
            path: the folder.
            verify: compare the content of every file with its hash, not just its size.

        Raises:
            ContainerError: any of its kinds; the folder is no container, or was changed.
            GenieConfigError: a configuration in it is not readable.
            TypeError: the folder holds another kind of container than this class.
        """
        from buildlib.container.container import GenAIContainer

        container = GenAIContainer.load(path, verify=verify)  # the one kind that metadata can name
        if not isinstance(container, cls):
            raise TypeError(f"{path} holds a {type(container).__name__}, no {cls.__name__}")
        return container
