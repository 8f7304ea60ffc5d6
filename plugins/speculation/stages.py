"""`forecast`, `hidden`, `draft`: forecast tokens; hidden states, and the head that reads them."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from buildlib.builder.model_folder import calibration_windows, link_configuration, load_factors
from buildlib.builder.speculative_config import SsdBuilderConfig
from buildlib.builder.stage import CachedStage
from buildlib.cache.key import text_sha256
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.encodings.files import load_encodings, save_encodings
from buildlib.graph.files import link_into, load_model, save_model
from buildlib.graph.validation import check_model, check_types
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.recipe import cache_bits, encodings_from_ranges
from plugins.speculation.dialog import PREFIX_FOLDER
from plugins.speculation.draft_model import (
    DraftHead,
    HiddenStatesOutput,
    observe_draft,
    shared_encodings,
)
from plugins.speculation.forecast_cache import CACHE_FILE, add_forecast_rows, write_prefix
from plugins.speculation.ssd_tensors import SsdTensors


@dataclass(frozen=True)
class AddForecast(CachedStage):
    """The model with forecast tokens after its vocabulary.

    Attributes:
        files: SHA-256 of the trained tensors by name.
    """

    operation = "forecast"
    model: CacheEntry
    config: SsdBuilderConfig
    files: Mapping[str, str]

    @property
    def subject(self) -> str:
        return f"{self.config.forecast_token_count} tokens"

    @property
    def source(self) -> Path:
        return self.config.ssd_tensor_file

    @property
    def options(self) -> Mapping[str, object]:
        return {
            "forecast_token_count": self.config.forecast_token_count,
            "forecast_prefix": self.config.forecast_prefix,
        }

    def run(self, folder: Path) -> None:
        before = self.model.folder
        tensors = SsdTensors.load(
            self.source,
            load_config(before / CONFIG_FILE),
            forecast_tokens=self.config.forecast_token_count,
            prefix_length=self.config.forecast_prefix,
        )
        add_forecast_rows(before / MODEL_FILE, folder / MODEL_FILE, tensors.embedding)
        (folder / PREFIX_FOLDER).mkdir()
        encodings = load_encodings(before / ENCODINGS_FILE)
        path = folder / PREFIX_FOLDER / CACHE_FILE
        write_prefix(tensors, encodings, path, load_factors(before))
        link_configuration(before, folder)


@dataclass(frozen=True)
class GiveHiddenStates(CachedStage):
    """The model with its hidden states as an output."""

    operation = "hidden"
    model: CacheEntry

    @property
    def subject(self) -> str:
        return "states"

    @property
    def options(self) -> Mapping[str, object]:
        return {}

    def run(self, folder: Path) -> None:
        HiddenStatesOutput().run(self.source, folder / MODEL_FILE)
        link_configuration(self.model.folder, folder)


@dataclass(frozen=True)
class PrepareDraft(CachedStage):
    """The model folder of a draft head, with encodings for all of it.

    Attributes:
        draft: the head as ONNX.
        files: SHA-256 of its files by name.
        with_states: the target with hidden states, its embedding in the graph.
        target: the same with its embedding on the host.
        calibration_text: on which the head is calibrated.
        quantization: bits of the head, whose cache has those of the target's.
    """

    operation = "draft"
    draft: Path
    files: Mapping[str, str]
    with_states: CacheEntry
    target: CacheEntry
    calibration_text: str | None
    quantization: QuantizationOptions

    @property
    def subject(self) -> str:
        return self.draft.name

    @property
    def source(self) -> Path:
        return self.draft

    @property
    def options(self) -> Mapping[str, object]:
        text = self.calibration_text
        return {
            "quantization": self.quantization,
            "calibration_sha256": text_sha256(text) if text else None,
        }

    def run(self, folder: Path) -> None:
        before = self.with_states.folder
        config = load_config(before / CONFIG_FILE)
        head = DraftHead.load(self.draft, config)
        model = load_model(self.draft)
        check_model(model, self.draft)
        check_types(model, self.draft)
        placed = save_model(model, folder / MODEL_FILE)
        head.write_config(before / CONFIG_FILE, folder / CONFIG_FILE)
        link_into(before / TOKENIZER_FILE, folder)
        tokens = self.quantization.calibration_tokens
        windows = calibration_windows(before, self.calibration_text, tokens)
        target = load_encodings(self.target.folder / ENCODINGS_FILE)
        bits = Bitwidths.from_options(self.quantization)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".calibrate.") as scratch:
            encodings = encodings_from_ranges(
                placed,
                shared_encodings(target),
                partial(observe_draft, placed, before / MODEL_FILE, config, windows, Path(scratch)),
                replace(bits, kv_bitwidth=cache_bits(target)),
            )
        save_encodings(encodings, folder / ENCODINGS_FILE)
