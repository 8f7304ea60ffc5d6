"""Parts that a model is cut into, and the names of their files and graphs."""

from dataclasses import dataclass
from pathlib import Path

from buildlib.container.dlc import inspect_dlc
from buildlib.container.layout import binary_name
from buildlib.container.manifest import GENIE_CONTRACT
from buildlib.graph.shape import GraphShape
from buildlib.passes.mllm_contract import MLLM_CONTRACT, graph_name, place
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


class MllmPart(Part):
    """A whole model in mllm's contract, which has one context length."""

    def graph(self, shape: GraphShape) -> str:
        """Return the name by which mllm's runners find the graph."""
        return graph_name(shape.ar)

    def binary_name(self, model: str) -> str:
        """Return the name of the context binary."""
        return f"{model}.bin"

    def ports(self, dlc: Path) -> GraphPorts | None:
        """Return the ports of a graph as mllm hands them over, which goes by order."""
        (graph,) = inspect_dlc(dlc).graphs
        inputs, outputs = (
            tuple(sorted(infos, key=lambda info: place(info.name)))
            for infos in (graph.inputs, graph.outputs)
        )
        return GraphPorts(inputs, outputs)


def all_parts(count: int, contract: str = GENIE_CONTRACT) -> tuple[Part, ...]:
    """Return all parts of a model in the order of data flow; in mllm's contract there is one."""
    if contract == MLLM_CONTRACT:
        return (MllmPart(1, 1),)
    return tuple(Part(number, count) for number in range(1, count + 1))
