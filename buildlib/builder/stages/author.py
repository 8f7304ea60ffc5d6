"""`load`: a checkpoint as float ONNX in canonical form, without encodings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.sources import CheckpointSource
from buildlib.builder.stage import CachedStage
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.layout import CONFIG_FILE
from buildlib.checkpoint.tokenizer import write_configuration
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape


@dataclass(frozen=True)
class AuthorModel(CachedStage):
    """The checkpoint's model in canonical form, its weights linked from the checkpoint's files.

    Attributes:
        files: SHA-256 of the checkpoint's files by name.
        shape: of the ONNX.
    """

    operation = "load"
    checkpoint: CheckpointSource
    files: Mapping[str, str]
    shape: GraphShape

    @property
    def subject(self) -> str:
        return self.checkpoint.name

    @property
    def source(self) -> Path:
        return self.checkpoint.folder

    @property
    def options(self) -> Mapping[str, object]:
        return {"ar": self.shape.ar, "cl": self.shape.cl}

    def run(self, folder: Path) -> None:
        checkpoint = Checkpoint.load(self.checkpoint.folder)
        checkpoint.check_content()
        config = (checkpoint.folder / CONFIG_FILE).read_bytes()
        write_configuration(config, checkpoint.tokenizer_path, folder)
        export_onnx(checkpoint, self.shape, folder)
