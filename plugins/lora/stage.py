"""`lora`: adapters as inputs of the graph."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.lora_config import BEYOND_FILE, LoraBuilderInputConfig, LoraSet
from buildlib.builder.model_folder import calibration_windows, link_configuration, load_factors
from buildlib.builder.stage import CachedStage
from buildlib.cache.key import text_sha256
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.files import atomic_write_bytes
from buildlib.graph.files import load_model
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.calibration import range_choice
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.recipe import choose_cache_bits
from plugins.lora.adapters import Adapters
from plugins.lora.branches import LoraBranches
from plugins.lora.calibration import calibrate_adapters
from plugins.lora.projections import find_projections

LORA_FILE = "genie_lora.json"
"""The engine's block for the adapters beside it."""


@dataclass(frozen=True)
class AddLora(CachedStage):
    """The model with branches for adapters, and the adapters as files.

    Attributes:
        adapters: that `config` names.
        files: SHA-256 of the adapters' files by name.
        quantization: that the encodings of the model were made with.
    """

    operation = "lora"
    model: CacheEntry
    config: LoraBuilderInputConfig
    adapters: LoraSet
    files: Mapping[str, str]
    calibration_text: str | None
    quantization: QuantizationOptions

    @property
    def subject(self) -> str:
        return ", ".join(case.name for case in self.adapters.cases)

    @property
    def source(self) -> Path:
        return self.config.lora_config_path

    @property
    def options(self) -> Mapping[str, object]:
        text = self.calibration_text
        return {
            "lora_config": self.config.model_dump(mode="json", exclude={"lora_config_path"}),
            "adapters": [adapter.name for adapter in self.adapters.adapters],
            "use_cases": [case.model_dump() for case in self.adapters.cases],
            "calibration_sha256": text_sha256(text) if text else None,
            "activation_ranges": self.quantization.activation_ranges,
            "act_bitwidth": self.quantization.act_bitwidth,
            "calibration_tokens": self.quantization.calibration_tokens,
        }

    def run(self, folder: Path) -> None:
        before, target = self.model.folder, folder / MODEL_FILE
        projections = find_projections(load_model(before / MODEL_FILE))
        adapters = Adapters.load(self.adapters, projections, load_factors(before))
        bits = Bitwidths.from_options(self.quantization)
        kv_bits = choose_cache_bits(bits, load_encodings(before / ENCODINGS_FILE))
        alpha = self.config.alpha_tensor_name
        LoraBranches(adapters.branches, alpha).run(before / MODEL_FILE, target)
        calibrated = calibrate_adapters(
            target,
            adapters,
            alpha,
            load_config(before / CONFIG_FILE),
            calibration_windows(
                before, self.calibration_text, self.quantization.calibration_tokens
            ),
            self.config.quant_updatable_mode,
            range_choice(self.quantization.activation_ranges, bits.act_bitwidth, kv_bits),
        )
        save_encodings(calibrated.encodings, folder / ENCODINGS_FILE)
        adapters.write(folder)
        atomic_write_bytes(folder / LORA_FILE, adapters.genie(alpha).to_json().encode())
        atomic_write_bytes(folder / BEYOND_FILE, json.dumps(calibrated.beyond).encode())
        link_configuration(before, folder)
