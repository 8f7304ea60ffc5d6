"""`mllm`: a `.mllm` file as canonical float ONNX, with encodings for all of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.stage import CachedStage
from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE
from buildlib.checkpoint.tokenizer import write_configuration
from buildlib.encodings.files import save_encodings
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.quantize.recipe import complete_encodings
from plugins.mllm.canonical import restore_encodings, write_checkpoint
from plugins.mllm.config import AotConfig, ModelConfig
from plugins.mllm.parameter_file import ParameterFile


@dataclass(frozen=True)
class ImportMllm(CachedStage):
    """The model of a `.mllm` file, by the integers and grids of the file.

    Attributes:
        file: `check_contents` has passed its tensors.
        files: SHA-256 of it, of its configurations and of the tokenizer, by name.
        shape: of the ONNX.
    """

    operation = "mllm"
    file: ParameterFile
    model: ModelConfig
    aot: AotConfig
    tokenizer: Path
    files: Mapping[str, str]
    shape: GraphShape

    @property
    def subject(self) -> str:
        return self.file.path.stem

    @property
    def source(self) -> Path:
        return self.file.path

    @property
    def options(self) -> Mapping[str, object]:
        return {"ar": self.shape.ar, "cl": self.shape.cl}

    def run(self, folder: Path) -> None:
        tensors = self.file.tensors
        write_checkpoint(tensors, self.model, self.aot, folder)
        write_configuration((folder / CONFIG_FILE).read_bytes(), self.tokenizer, folder)
        checkpoint = Checkpoint.load(folder)
        checkpoint.check_content()
        onnx = export_onnx(checkpoint, self.shape, folder)
        grids = restore_encodings(tensors, self.model, self.aot)
        encodings = complete_encodings(onnx, grids, checkpoint.config)
        save_encodings(encodings, folder / ENCODINGS_FILE)
