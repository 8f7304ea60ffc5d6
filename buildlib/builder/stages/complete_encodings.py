"""`quantize encodings`: the missing encodings, by calibration."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.model_folder import (
    calibration_windows,
    link_configuration,
    load_ranges,
)
from buildlib.builder.original_paths import original_paths
from buildlib.builder.sources import ModelSource
from buildlib.builder.stage import CachedStage
from buildlib.cache.key import text_sha256
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.encodings.model import Encodings
from buildlib.graph.files import load_model, save_model
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.recipe import complete_encodings


@dataclass(frozen=True)
class CompleteEncodings(CachedStage):
    """The model with encodings for all of it.

    Attributes:
        export: that it was made of; errors name its files.
        quantization: bits of tensors without encodings.
    """

    operation = "quantize"
    imported: CacheEntry
    export: ModelSource
    quantization: QuantizationOptions

    @property
    def subject(self) -> str:
        return "encodings"

    @property
    def options(self) -> Mapping[str, object]:
        text = self.export.calibration_text
        return {
            "quantization": self.quantization,
            "calibration_sha256": text_sha256(text) if text else None,
        }

    def run(self, folder: Path) -> None:
        with original_paths(self.export):
            self._complete(self.imported.folder, folder)

    def _complete(self, imported: Path, folder: Path) -> None:
        # Calibration puts files beside the model: not into an entry that other builds check.
        model = save_model(load_model(imported / MODEL_FILE), folder / MODEL_FILE)
        encodings = imported / ENCODINGS_FILE
        text, tokens = self.export.calibration_text, self.quantization.calibration_tokens
        windows = calibration_windows(imported, text, tokens)
        complete = complete_encodings(
            model,
            load_encodings(encodings) if encodings.is_file() else Encodings(),
            load_config(imported / CONFIG_FILE),
            windows,
            Bitwidths.from_options(self.quantization),
            ranges=self.quantization.activation_ranges,
            observed=load_ranges(imported, windows),
        )
        link_configuration(imported, folder)
        save_encodings(complete, folder / ENCODINGS_FILE)
