"""`quantize encodings`: the missing encodings, by calibration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from buildlib.builder.model_folder import (
    calibration_windows,
    link_configuration,
    load_ranges,
    loss_windows,
    save_loss,
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
from buildlib.graph import interface
from buildlib.graph.files import load_model, save_model
from buildlib.graph.interface import require_shape
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.loss import LossMeter, judge_quantization
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.recipe import cache_bits, complete_encodings


@dataclass(frozen=True)
class CompleteEncodings(CachedStage):
    """The model with encodings for all of it, and what they cost on the calibration text.

    Attributes:
        float_model: that the loss is measured against.
        export: that it was made of; errors name its files.
        quantization: bits of tensors without encodings.
        sharing: a complete model that feeds the same caches, whose grids of keys and values are
            taken where this one's have no encodings.
    """

    operation = "quantize"
    imported: CacheEntry
    export: ModelSource
    quantization: QuantizationOptions
    float_model: CacheEntry
    sharing: CacheEntry | None = None

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
        path, config = imported / ENCODINGS_FILE, load_config(imported / CONFIG_FILE)
        own = load_encodings(path) if path.is_file() else Encodings()
        encodings = self._with_caches(own)
        text, tokens = self.export.calibration_text, self.quantization.calibration_tokens
        windows = calibration_windows(imported, text, tokens)
        bits = Bitwidths.from_options(self.quantization)
        complete = complete_encodings(
            model,
            encodings,
            config,
            windows,
            bits,
            ranges=self.quantization.activation_ranges,
            observed=load_ranges(imported, windows),
        )
        link_configuration(imported, folder)
        windows = loss_windows(imported, text)
        if windows:
            given = own if self.imported == self.float_model else Encodings()
            is_open = bits.kv_bitwidth is None and cache_bits(encodings) is None
            rows = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
            size = rows * require_shape(model).cl
            complete = self._judge(model, complete, given, windows, size if is_open else None)
        save_encodings(complete, folder / ENCODINGS_FILE)

    def _with_caches(self, own: Encodings) -> Encodings:
        """Add the encodings of the caches that are shared."""
        if self.sharing is None:
            return own
        theirs, names = load_encodings(self.sharing.folder / ENCODINGS_FILE), own.by_name()
        caches = [
            encoding
            for encoding in theirs.activation_encodings
            if interface.is_kv(encoding.name) and encoding.name not in names
        ]
        activations = (*own.activation_encodings, *caches)
        return own.model_copy(update={"activation_encodings": activations})

    def _judge(
        self,
        model: Path,
        encodings: Encodings,
        given: Encodings,
        windows: Sequence[Sequence[int]],
        open_cache: int | None,
    ) -> Encodings:
        """Measure the loss, and keep it beside the model."""
        folder = model.parent
        with TemporaryDirectory(dir=folder, prefix=".float.") as scratch:
            source = self.float_model.folder / MODEL_FILE
            float_model = save_model(load_model(source), Path(scratch) / MODEL_FILE)
            config = load_config(folder / CONFIG_FILE)
            with LossMeter(float_model, model, config, windows) as meter:
                encodings, loss = judge_quantization(meter, encodings, given, open_cache)
        save_loss(folder, loss)
        return encodings
