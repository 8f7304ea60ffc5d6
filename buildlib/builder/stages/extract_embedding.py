"""`embedding`: the embedding table out of the graph, as a file of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.model_folder import link_configuration
from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.layout import MODEL_FILE
from buildlib.embedding.config import TABLE_FILE, EmbedDatatype
from buildlib.embedding.extraction import EmbeddingExtraction
from buildlib.embedding.table import write_table
from buildlib.files import atomic_write_bytes

EMBEDDING_FILE = "embedding.json"
"""An `EmbeddingConfig` whose path is relative to its folder."""


@dataclass(frozen=True)
class ExtractEmbedding(CachedStage):
    """The model without its embedding, and the table as a file."""

    operation = "embedding"
    model: CacheEntry
    datatype: EmbedDatatype

    @property
    def subject(self) -> str:
        return "table"

    @property
    def options(self) -> Mapping[str, object]:
        return {"embed_datatype": self.datatype}

    def run(self, folder: Path) -> None:
        table = write_table(self.source, folder / TABLE_FILE, self.datatype)
        EmbeddingExtraction().run(self.source, folder / MODEL_FILE)
        relative = table.model_copy(update={"embed_path": Path(TABLE_FILE)})
        atomic_write_bytes(folder / EMBEDDING_FILE, relative.model_dump_json(indent=2).encode())
        link_configuration(self.model.folder, folder)
