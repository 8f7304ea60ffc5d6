"""Speculative decoding as an addition to a build."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.additions import (
    Addition,
    Composition,
    DialogFacts,
    Making,
    PreparedModel,
    draft_binary,
    options_of,
)
from buildlib.builder.options import OptionValue
from buildlib.builder.speculative_config import (
    EagletBuilderConfig,
    SpeculativeConfig,
    SsdBuilderConfig,
)
from buildlib.builder.stage import CachedStage
from buildlib.checkpoint.layout import TOKENIZER_FILE
from buildlib.container.genie_config import GenieConfig
from buildlib.container.manifest import SpeculationRecord
from buildlib.container.writer import ContainerFile
from buildlib.graph.files import external_tensors, load_model
from buildlib.targets import Target
from plugins.speculation.agreement import check_on_emulator
from plugins.speculation.dialog import (
    DRAFT_FOLDER,
    PREFIX_FOLDER,
    PlainDialog,
    check_speculation,
    speculate,
)
from plugins.speculation.draft_model import DraftHead
from plugins.speculation.forecast_cache import CACHE_FILE
from plugins.speculation.genie_check import require_agreement
from plugins.speculation.stages import AddForecast, GiveHiddenStates, PrepareDraft


@dataclass(frozen=True)
class Speculating(Addition):
    """A kind of speculative decoding."""

    config: SpeculativeConfig

    @property
    def on_host(self) -> bool:
        return isinstance(self.config, EagletBuilderConfig)

    @property
    def trained(self) -> str:
        kinds = {SsdBuilderConfig: "forecast tokens", EagletBuilderConfig: "draft heads"}
        return kinds.get(type(self.config), "")

    def as_options(self) -> dict[str, OptionValue]:
        return options_of("speculative_config", self.config)

    def files(self) -> Iterator[Path]:
        yield from (path for _, path in self.config if isinstance(path, Path))
        if isinstance(self.config, EagletBuilderConfig):
            draft = load_model(self.config.draft_model_path)
            yield from (Path(tensor.path) for tensor in external_tensors(draft))

    def check(self, ars: Sequence[int], *, on_host: bool) -> None:
        check_speculation(self.config, ars, on_host=on_host)

    def check_target(self, target: Target, cache_root: Path) -> None:
        require_agreement(self.config, target, cache_root)

    def stages(self, making: Making) -> None:
        match self.config:
            case SsdBuilderConfig(ssd_tensor_file=path):
                hashes = making.hash_files({path.name: path})
                entry = making.add(AddForecast(making.last, self.config, hashes))
                making.prepared["forecast"] = entry.folder
            case EagletBuilderConfig():
                making.prepared["with_states"] = making.add(GiveHiddenStates(making.last))
                making.prepared["draft"] = (f"{DRAFT_FOLDER}/{draft_binary(making.name)}",)

    def draft(self, making: Making) -> CachedStage | None:
        if not isinstance(self.config, EagletBuilderConfig):
            return None
        path = self.config.draft_model_path
        files = {Path(tensor.path) for tensor in external_tensors(load_model(path))} | {path}
        hashes = making.hash_files({file.name: file for file in sorted(files)})
        states, text = making.prepared["with_states"], making.calibration_text
        return PrepareDraft(path, hashes, states, making.last, text, making.quantization)

    def compare(self, folder: Path, config: GenieConfig) -> SpeculationRecord | None:
        return check_on_emulator(folder, config)

    def genie(self, made: Composition, prepared: PreparedModel, facts: DialogFacts) -> Composition:
        plain = PlainDialog(made.genie_config, facts.target, prepared.model / TOKENIZER_FILE)
        vocabulary = None
        if isinstance(self.config, EagletBuilderConfig):
            vocabulary = DraftHead.load(self.config.draft_model_path, facts.decoder).n_vocab
        how = speculate(plain, self.config, facts.ars, prepared.draft, vocabulary)
        files = {
            name: ContainerFile(path, "configuration" if path.suffix == ".json" else "binary")
            for name, path in how.files.items()
        }
        if prepared.forecast is not None:
            name = f"{PREFIX_FOLDER}/{CACHE_FILE}"
            files[name] = ContainerFile(prepared.forecast / name, "forecast_prefix")
        return made.having(how.genie_config, files)
