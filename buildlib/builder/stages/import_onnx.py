"""`import`: an ONNX export of anybody's in the one form that all later stages know."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.canonical import ImportModel, check_rotation, reader_modules
from buildlib.builder.original_paths import original_paths
from buildlib.builder.sources import OnnxSource
from buildlib.builder.stage import CachedStage
from buildlib.cache.key import text_sha256
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE
from buildlib.checkpoint.tokenizer import check_tokenizer, write_configuration
from buildlib.encodings.files import format_modules, load_encodings, save_encodings
from buildlib.files import atomic_write_bytes
from buildlib.graph.files import external_tensors, link_into, load_model
from buildlib.graph.shape import GraphShape
from buildlib.graph.validation import check_interface, check_model, check_sizes, check_types


@dataclass(frozen=True)
class ImportOnnx(CachedStage):
    """A model folder with canonical ONNX, and the encodings that the user gave.

    Attributes:
        files: SHA-256 of the export's files by name.
        shape: for an export with symbolic sizes; others keep their own.
        operations: of op packages, as `my.package::Scale`, which the model may have.
    """

    operation = "import"
    export: OnnxSource
    files: Mapping[str, str]
    shape: GraphShape | None
    operations: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        return self.export.name

    @property
    def source(self) -> Path:
        return self.export.model

    @property
    def options(self) -> Mapping[str, object]:
        return {
            "ar": self.shape.ar if self.shape else None,
            "cl": self.shape.cl if self.shape else None,
            "config_sha256": text_sha256(self.export.config),
            **({"operations": self.operations} if self.operations else {}),
        }

    @property
    def modules(self) -> tuple[str, ...]:
        return *super().modules, *reader_modules(), *format_modules()

    def run(self, folder: Path) -> None:
        source = self.export
        copies = {
            folder / CONFIG_FILE: source.config_file,
            folder / MODEL_FILE: source.model,
        }
        model = load_model(source.model)
        check_model(model, source.model)
        atomic_write_bytes(folder / CONFIG_FILE, source.config.encode())
        with original_paths(source, copies):
            config = load_config(folder / CONFIG_FILE)
        check_tokenizer(source.tokenizer, config)
        write_configuration(source.config.encode(), source.tokenizer, folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".source.") as scratch:
            placed = link_into(source.model, Path(scratch), MODEL_FILE)
            for path in {Path(tensor.path) for tensor in external_tensors(model)}:
                link_into(path, Path(scratch))
            copies[placed] = source.model
            if source.encodings is not None:
                copy = Path(scratch) / ENCODINGS_FILE
                copies[save_encodings(load_encodings(source.encodings), copy)] = source.encodings
            importing = ImportModel(self.shape, fixed_keep_theirs=True, operations=self.operations)
            with original_paths(source, copies):
                importing.run(placed, folder / MODEL_FILE)
        imported = load_model(folder / MODEL_FILE)
        check_interface(imported, source.model)
        check_sizes(imported, config, source.config_file)
        check_types(imported, source.model)
        check_rotation(importing, config, source.config_file)
