"""Parts that a model is cut into, and the names of their files and graphs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry
from buildlib.container.manifest import GENIE_CONTRACT, binary_name
from buildlib.graph.shape import GraphShape
from buildlib.toolchains.base import GraphPorts


@dataclass(frozen=True)
class Part:
    """One of the parts that a model is cut into, counted from 1."""

    number: int
    count: int

    @property
    def stem(self) -> str:
        """Name of files that the part has in common at all shapes: `1_of_2`."""
        return f"{self.number}_of_{self.count}"

    def split(self, shape: GraphShape) -> str:
        """Return the name of the part as it is cut from the model: `ar32_cl192_1_of_2`."""
        return f"{shape}_{self.stem}"

    def graph(self, shape: GraphShape) -> str:
        """Return the name of the part's graph at a shape, and of its files from there on."""
        return self.split(shape)

    def binary_name(self, model: str) -> str:
        """Return the name of the part's context binary, as AI Hub's bundles have it."""
        return binary_name(model, self.number, self.count)

    def ports(self, dlc: Path) -> GraphPorts | None:  # noqa: ARG002
        """Return the ports of a graph in the order that its binary needs; None for any order."""
        return None


@dataclass(frozen=True)
class GraphContract:
    """Names and order of the inputs and outputs of graphs; these are Genie's, others are plugins'.

    Attributes:
        name: see `buildlib.toolchains.qnn.contracts`.
        kv_bitwidth: of its caches; None where it takes any.
    """

    name: str = GENIE_CONTRACT
    kv_bitwidth: Literal[8, 16] | None = None

    def parts(self, count: int) -> tuple[Part, ...]:
        """Return all parts of a model in the order of data flow."""
        return tuple(Part(number, count) for number in range(1, count + 1))

    def stage(
        self,
        split: CacheEntry,  # noqa: ARG002
        model: CacheEntry,  # noqa: ARG002
        shape: GraphShape,  # noqa: ARG002
        positions: int,  # noqa: ARG002
    ) -> CachedStage | None:
        """Return the stage that gives the parts of a model at a shape this contract, if any.

        Args:
            split: the parts in Genie's contract.
            model: that they were made of, with its configuration.
            positions: of the longest context, and of the padding that may follow.
        """
        return None


GENIE = GraphContract()
