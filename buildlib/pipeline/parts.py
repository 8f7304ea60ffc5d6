"""Parts that a model is cut into, and the names of their files."""

from dataclasses import dataclass

from buildlib.container.layout import binary_name
from buildlib.graph.shape import GraphShape


@dataclass(frozen=True)
class Part:
    """One of the parts that a model is cut into, counted from 1."""

    number: int
    count: int

    @property
    def stem(self) -> str:
        """Name of what belongs to the part at any shape: `1_of_2`."""
        return f"{self.number}_of_{self.count}"

    def graph(self, shape: GraphShape) -> str:
        """Return the name of the part's files and graph at a shape: `ar32_cl192_1_of_2`."""
        return f"{shape}_{self.stem}"

    def binary_name(self, model: str) -> str:
        """Return the name of the part's context binary, as AI Hub's bundles have it."""
        return binary_name(model, self.number, self.count)


def all_parts(count: int) -> tuple[Part, ...]:
    """Return all parts of a model in the order of data flow."""
    return tuple(Part(number, count) for number in range(1, count + 1))
