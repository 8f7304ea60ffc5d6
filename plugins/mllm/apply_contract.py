"""mllm's contract of graphs, and the stage `contract` that gives it to a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.parts import GraphContract, Part
from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE
from buildlib.container.dlc import inspect_dlc
from buildlib.graph.rope import rope_tables
from buildlib.graph.shape import GraphShape
from buildlib.toolchains.base import GraphPorts
from plugins.mllm.graph_contract import MLLM_CONTRACT, MllmContract, graph_name, place


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


@dataclass(frozen=True)
class ApplyMllmContract(CachedStage):
    """The whole model at one shape, in mllm's contract.

    Attributes:
        split: the model at `shape`, in Genie's.
        model: that it was made of, with its configuration.
        positions: rows of its tables of rotations, the same at all shapes: those of the context,
            and of the padding that may follow.
    """

    operation = "contract"
    split: CacheEntry
    model: CacheEntry
    shape: GraphShape
    positions: int

    @property
    def subject(self) -> str:
        return str(self.shape)

    @property
    def source(self) -> Path:
        return self.split.folder / f"{Part(1, 1).split(self.shape)}.onnx"

    @property
    def options(self) -> Mapping[str, object]:
        return {"contract": MLLM_CONTRACT, "ar": self.shape.ar, "positions": self.positions}

    def run(self, folder: Path) -> None:
        config = load_config(self.model.folder / CONFIG_FILE)
        adapted = folder / f"{MllmPart(1, 1).graph(self.shape)}.onnx"
        MllmContract(*rope_tables(config, self.positions)).run(self.source, adapted)


@dataclass(frozen=True)
class MllmGraphContract(GraphContract):
    """For whole models at one context length, with nothing added."""

    def parts(self, count: int) -> tuple[Part, ...]:
        """Return the whole model."""
        del count
        return (MllmPart(1, 1),)

    def stage(
        self, split: CacheEntry, model: CacheEntry, shape: GraphShape, positions: int
    ) -> CachedStage:
        """See `GraphContract.stage`."""
        return ApplyMllmContract(split, model, shape, positions)


MLLM = MllmGraphContract(MLLM_CONTRACT, kv_bitwidth=8)
