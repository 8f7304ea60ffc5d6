"""`quantize weights`: integer weights of a part, once for all its shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.parts import Part
from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry
from buildlib.graph.shape import GraphShape
from buildlib.quantize.qdq import quantize_weights


@dataclass(frozen=True)
class QuantizeWeights(CachedStage):
    """The integer weights of one part, which all its shapes share.

    Attributes:
        split: the parts at `shape`.
    """

    operation = "quantize"
    split: CacheEntry
    shape: GraphShape
    part: Part

    @property
    def subject(self) -> str:
        return f"weights {self.part.stem}"

    @property
    def source(self) -> Path:
        return self.split.folder / f"{self.part.graph(self.shape)}.onnx"

    @property
    def options(self) -> Mapping[str, object]:
        return {"part": self.part.stem}

    def run(self, folder: Path) -> None:
        quantize_weights(self.source, folder / f"{self.part.stem}.weights")
