"""`contract`: the model with the inputs and outputs of another runtime than Genie."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.parts import MllmPart, Part
from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE
from buildlib.graph.rope import rope_tables
from buildlib.graph.shape import GraphShape
from buildlib.passes.mllm_contract import MllmContract


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
        return {"contract": "mllm", "ar": self.shape.ar, "positions": self.positions}

    def run(self, folder: Path) -> None:
        config = load_config(self.model.folder / CONFIG_FILE)
        adapted = folder / f"{MllmPart(1, 1).graph(self.shape)}.onnx"
        MllmContract(*rope_tables(config, self.positions)).run(self.source, adapted)
