"""LoRA adapters as an addition to a build."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from buildlib.builder.additions import (
    Addition,
    Composition,
    DialogFacts,
    Making,
    PreparedModel,
    options_of,
)
from buildlib.builder.lora_config import LoraBuilderInputConfig, LoraSet
from buildlib.builder.options import OptionValue
from buildlib.container.genie_engine import Lora
from buildlib.container.writer import ContainerFile
from buildlib.errors import InvalidOptionError
from buildlib.paths import user_path
from plugins.lora.adapters import LORA_FOLDER, check_adapters
from plugins.lora.peft import read_adapter
from plugins.lora.stage import LORA_FILE, AddLora


@dataclass(frozen=True)
class LoraAdapters(Addition):
    """LoRA adapters, as inputs of the graphs."""

    config: LoraBuilderInputConfig

    @classmethod
    def of(cls, given: LoraBuilderInputConfig) -> "LoraAdapters":
        """Check the fields that the documented constructor does not, and that adapters are named.

        Raises:
            InvalidOptionError: a field has a value that cannot be built.
            ModelFileError: an adapter is not there, or cannot be read.
        """
        path = user_path(given.lora_config_path)
        config = LoraBuilderInputConfig.create(**(dict(given) | {"lora_config_path": path}))
        if not config.create_lora_graph:
            reason = "graphs that bring their own branches are not built here; set it to True"
            raise InvalidOptionError("lora_config.create_lora_graph", reason, ())
        for adapter in LoraSet.load(config.lora_config_path).adapters:
            for module in read_adapter(adapter.path).modules.values():
                module.matrices()
        return cls(config)

    @property
    def trained(self) -> str:
        return "adapters"

    def as_options(self) -> dict[str, OptionValue]:
        return options_of("lora_config", self.config)

    def files(self) -> Iterator[Path]:
        yield self.config.lora_config_path
        yield from LoraSet.load(self.config.lora_config_path).files().values()

    def check_model(self, model: ir.Model) -> None:
        check_adapters(self.config, model)

    def stages(self, making: Making) -> None:
        adapters = LoraSet.load(self.config.lora_config_path)
        hashes, text = making.hash_files(adapters.files()), making.calibration_text
        bits = making.quantization
        entry = making.add(AddLora(making.last, self.config, adapters, hashes, text, bits))
        making.prepared["lora"] = entry.folder

    def genie(self, made: Composition, prepared: PreparedModel, facts: DialogFacts) -> Composition:  # noqa: ARG002
        folder = prepared.lora
        assert folder is not None  # noqa: S101  (of its stage)
        lora = Lora.model_validate_json((folder / LORA_FILE).read_text("utf-8"))
        files = {
            path.relative_to(folder).as_posix(): ContainerFile(path, "lora")
            for path in sorted((folder / LORA_FOLDER).rglob("*.raw"))
        }
        return made.having(made.genie_config.with_lora(lora), files)
