"""`optimize`: keys and values rescaled, and weights changed by techniques such as GPTAQ."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.model_folder import (
    calibration_windows,
    link_configuration,
    load_factors,
    save_factors,
    save_ranges,
)
from buildlib.builder.original_paths import original_paths
from buildlib.builder.sources import ModelSource, OnnxSource
from buildlib.builder.stage import CachedStage
from buildlib.cache.key import text_sha256
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.encodings.model import Encodings
from buildlib.entry_points import entry_modules
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.optimization import optimize_weights
from buildlib.quantize.options import DOOR, QuantizationOptions, StepName
from buildlib.quantize.techniques.base import FloatModel


@dataclass(frozen=True)
class OptimizeWeights(CachedStage):
    """The float model with changed weights, and encodings of those that lie on their grids.

    Attributes:
        model: in canonical form, with encodings of some values or none.
        export: that it was made of; errors name its files.
        quantization: the techniques, and the bits of weights.
    """

    operation = "optimize"
    model: CacheEntry
    export: ModelSource
    quantization: QuantizationOptions

    @property
    def subject(self) -> str:
        return "weights"

    @property
    def options(self) -> Mapping[str, object]:
        bits, text = Bitwidths.from_options(self.quantization), self.export.calibration_text
        return {
            "steps": self.steps,
            "techniques": {
                name: getattr(self.quantization.technique_kwargs, name).model_dump()
                for name in self.quantization.weight_techniques
            },
            "param_bitwidth": bits.param_bitwidth,
            "lpbq_block_size": bits.lpbq_block_size,
            "mixed_precision": bits.mixed_precision,
            "calibration_sha256": text_sha256(text) if text else None,
            "calibration_tokens": self.quantization.calibration_tokens,
        }

    @property
    def modules(self) -> tuple[str, ...]:
        return *super().modules, *entry_modules(DOOR, self.quantization.weight_techniques)

    @property
    def steps(self) -> tuple[StepName, ...]:
        """Changes of the model, in order."""
        encoded = isinstance(self.export, OnnxSource) and self.export.encodings is not None
        return self.quantization.steps(encoded=encoded)

    def run(self, folder: Path) -> None:
        source = self.model.folder
        encodings = source / ENCODINGS_FILE
        text = self.export.calibration_text
        tokens = self.quantization.calibration_tokens
        calibrating = windows = calibration_windows(source, text, tokens)
        if self.quantization.weight_techniques:
            windows = calibration_windows(source, text, quantization=self.quantization)
        long = [window for window in calibrating if len(window) == len(calibrating[0])]
        if all(window in windows for window in long):
            windows = [*calibrating, *(each for each in windows if each not in calibrating)]
        else:
            calibrating = []
        model = FloatModel(
            source / MODEL_FILE,
            load_encodings(encodings) if encodings.is_file() else Encodings(),
            load_config(source / CONFIG_FILE),
            windows,
            Bitwidths.from_options(self.quantization),
            len(calibrating),
            factors=load_factors(source),
        )
        with original_paths(self.export):
            result = optimize_weights(
                model,
                self.steps,
                folder,
                arguments=self.quantization.technique_kwargs,
            )
        link_configuration(source, folder)
        save_encodings(result.encodings, folder / ENCODINGS_FILE)
        save_factors(folder, result.factors)
        if result.ranges is not None:
            save_ranges(folder, calibrating, result.ranges)
