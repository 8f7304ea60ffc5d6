"""`transform`: a model cut into its parts, and their attention into heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.options import MhaConfig, SplitModelConfig
from buildlib.builder.original_paths import original_paths
from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry
from buildlib.graph.shape import GraphShape
from buildlib.passes.mha2sha import convert_mha2sha
from buildlib.passes.split import split_model

MULTI_HEAD = "multi_head"
"""Folder in that of the stage with the parts before their heads are taken apart."""


@dataclass(frozen=True)
class Transform(CachedStage):
    """The parts `{shape}_{k}_of_{n}.onnx` of the model at one shape.

    Attributes:
        n_parts: that `split_model` asks for, or that the sizes of weights do.
    """

    operation = "transform"
    model: CacheEntry
    shape: GraphShape
    n_parts: int
    split_model: SplitModelConfig
    mha2sha: MhaConfig

    @property
    def subject(self) -> str:
        return str(self.shape)

    @property
    def options(self) -> Mapping[str, object]:
        split_model = self.split_model.model_copy(update={"num_splits": self.n_parts})
        return {"split_model": split_model, "mha2sha": self.mha2sha}

    def run(self, folder: Path) -> None:
        parts = split_model(
            self.source,
            self.n_parts,
            folder / MULTI_HEAD if self.mha2sha.enabled else folder,
            split_embedding=self.split_model.split_embedding,
            split_lm_head=self.split_model.split_lm_head,
        )
        if self.mha2sha.enabled:
            for part in parts:
                with original_paths(None, {part: Path(part.name)}):
                    convert_mha2sha(part, folder / part.name)
