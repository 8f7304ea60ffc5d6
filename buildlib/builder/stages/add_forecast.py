"""`forecast`: rows of forecast tokens in the embedding table, and their prefix as a cache file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.model_folder import link_configuration, load_factors
from buildlib.builder.stage import CachedStage
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE
from buildlib.encodings.files import load_encodings
from buildlib.speculative.config import PREFIX_FOLDER, SsdBuilderConfig
from buildlib.speculative.forecast import CACHE_FILE, add_forecast_rows, write_prefix
from buildlib.speculative.ssd_tensors import SsdTensors


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
