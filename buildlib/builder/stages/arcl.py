"""`arcl`: the whole model at one (AR, CL); weights stay shared."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, MODEL_FILE
from buildlib.graph import interface
from buildlib.graph.files import load_proto
from buildlib.graph.shape import GraphShape, check_context
from buildlib.passes.arcl import convert_arcl


@dataclass(frozen=True)
class ConvertShape(CachedStage):
    """The whole model at one shape."""

    operation = "arcl"
    model: CacheEntry
    shape: GraphShape

    @property
    def subject(self) -> str:
        return str(self.shape)

    @property
    def options(self) -> Mapping[str, object]:
        return {"ar": self.shape.ar, "cl": self.shape.cl}

    def run(self, folder: Path) -> None:
        config = load_config(self.model.folder / CONFIG_FILE)
        outputs = {name for node in load_proto(self.source).graph.node for name in node.output}
        windowed = interface.WINDOW_MASK in outputs
        check_context(self.shape, config.context_limit(windowed=windowed))
        convert_arcl(self.source, self.shape, folder / MODEL_FILE)
