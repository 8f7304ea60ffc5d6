"""Additions of a build to the plain model; each kind is one object.

An addition is checked before anything runs, adds its stages behind those of the canonical model,
and its block and files to Genie's configuration.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import onnx_ir as ir

from buildlib.builder.build_options import BuildOptions
from buildlib.builder.lora_config import LoraBuilderInputConfig
from buildlib.builder.options import OptionValue
from buildlib.builder.speculative_config import SpeculativeConfig
from buildlib.builder.stage import CachedStage
from buildlib.builder.stages.extract_embedding import EMBEDDING_FILE, ExtractEmbedding
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.config import DecoderConfig
from buildlib.container.genie_config import GenieConfig
from buildlib.container.manifest import SpeculationRecord
from buildlib.container.op_packages import (
    OpPackage,
    added_operations,
    host_libraries,
    registrations,
    select_packages,
)
from buildlib.container.writer import ContainerFile
from buildlib.embedding.config import TABLE_FILE, EmbedDatatype, EmbeddingConfig
from buildlib.entry_points import load_entry
from buildlib.errors import InvalidOptionError
from buildlib.quantize.options import QuantizationOptions
from buildlib.targets import Target
from buildlib.toolchains.base import OpPackageLibrary, Toolchain

DOOR = "additions"


@dataclass(frozen=True)
class PreparedModel:
    """The model of all shapes, and what additions put beside it.

    Attributes:
        model: folder with `model.onnx`, `model.encodings`, `config.json`, `tokenizer.json`.
        lora: folder with adapters.
        table: folder with an embedding table.
        forecast: folder with the prefix of forecast tokens.
        draft: names in the container of the binaries of a model that drafts.
        with_states: with hidden states as an output, and the embedding still in the graph.
    """

    model: Path
    lora: Path | None = None
    table: Path | None = None
    forecast: Path | None = None
    draft: tuple[str, ...] = ()
    with_states: CacheEntry | None = None


@dataclass(frozen=True)
class Composition:
    """Genie configuration, and the files beyond binaries and tokenizer that it names."""

    genie_config: GenieConfig
    extras: Mapping[str, ContainerFile] = field(default_factory=dict)

    def having(self, config: GenieConfig, files: Mapping[str, ContainerFile]) -> "Composition":
        """Return a copy with another configuration, and further files."""
        return Composition(config, {**self.extras, **files})


@dataclass
class Making:
    """A canonical model, while stages are added to it.

    Attributes:
        name: of the build's model.
        quantization: that its encodings are made with.
        declare: declares a stage, and returns its output.
        hash_files: gives the SHA-256 of the user's files.
        versions: outputs of the stages so far.
        prepared: what they put beside it, by the fields of `PreparedModel`.
    """

    name: str
    calibration_text: str | None
    quantization: QuantizationOptions
    declare: Callable[[CachedStage], CacheEntry]
    hash_files: Callable[[Mapping[str, Path]], Mapping[str, str]]
    versions: list[CacheEntry]
    prepared: dict[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> CacheEntry:
        """The model that the next stage changes."""
        return self.versions[-1]

    def add(self, stage: CachedStage) -> CacheEntry:
        """Add a stage that changes the model."""
        self.versions.append(self.declare(stage))
        return self.last


@dataclass(frozen=True)
class DialogFacts:
    """The dialog that an addition changes: where it runs, and its graphs."""

    target: Target
    ars: Sequence[int]
    decoder: DecoderConfig


class Addition:
    """One addition to the plain model; the base adds nothing.

    Attributes:
        reads_stream: whether it takes the hidden states as the checkpoint has them.
    """

    reads_stream: ClassVar[bool] = True

    @property
    def on_host(self) -> bool:
        """True if the host has to look tokens up for it."""
        return False

    @property
    def trained(self) -> str:
        """Its parts that were trained on the hidden states of the model; empty if none were."""
        return ""

    def as_options(self) -> dict[str, OptionValue]:
        """Return its options under dotted keys."""
        return {}

    def files(self) -> Iterator[Path]:
        """Yield the user's files and folders that it is made of."""
        yield from ()

    def check(self, ars: Sequence[int], *, on_host: bool) -> None:
        """Check it as far as possible before anything is built.

        Args:
            ars: of the graphs.
            on_host: whether tokens are looked up on the host.
        """

    def check_target(self, target: Target, cache_root: Path) -> None:
        """Check, by running it if need be, that what is installed gets it right on a target."""

    def check_model(self, model: ir.Model) -> None:
        """Check that a canonical model can have it."""

    def stages(self, making: Making) -> None:
        """Add its stages to a model."""

    def draft(self, making: Making) -> CachedStage | None:  # noqa: ARG002
        """Return the stage of a second model that drafts, when all have added theirs."""
        return None

    def compare(self, folder: Path, config: GenieConfig) -> SpeculationRecord | None:  # noqa: ARG002
        """Compare the texts of the container's dialog in a folder with plain decoding's."""
        return None

    def genie(
        self,
        made: Composition,
        prepared: PreparedModel,  # noqa: ARG002
        facts: DialogFacts,  # noqa: ARG002
    ) -> Composition:
        """Add its block and files to a dialog."""
        return made


@dataclass(frozen=True)
class HostTable(Addition):
    """An embedding table that the host looks tokens up in, in place of the lookup in the graph."""

    datatype: EmbedDatatype

    def as_options(self) -> dict[str, OptionValue]:
        return {"embedding.embed_datatype": self.datatype}

    def stages(self, making: Making) -> None:
        stage = ExtractEmbedding(making.last, self.datatype)
        making.prepared["table"] = making.add(stage).folder

    def genie(self, made: Composition, prepared: PreparedModel, facts: DialogFacts) -> Composition:  # noqa: ARG002
        folder = prepared.table
        assert folder is not None  # noqa: S101  (of its stage)
        text = (folder / EMBEDDING_FILE).read_text("utf-8")
        config = made.genie_config.with_embedding(EmbeddingConfig.model_validate_json(text).genie())
        return made.having(config, {TABLE_FILE: ContainerFile(folder / TABLE_FILE, "embedding")})


@dataclass(frozen=True)
class OwnOperations(Addition):
    """Operations of the user's own.

    Attributes:
        packages: their libraries for the target.
        host: those for this host, for the compiler.
        names: of the operations, as `my.package::Scale`.
    """

    packages: tuple[OpPackage, ...] = ()
    host: tuple[OpPackageLibrary, ...] = ()
    names: tuple[str, ...] = ()
    reads_stream: ClassVar[bool] = False

    def as_options(self) -> dict[str, OptionValue]:
        packages = [package.in_container() for package in self.packages]
        return {"op_packages": tuple(map(str, registrations(packages)))}

    def files(self) -> Iterator[Path]:
        for package in self.packages:
            yield from package.files().values()
        yield from (Path(package.library) for package in self.host)


def additions_of(
    options: BuildOptions, target: Target, toolchain: Toolchain
) -> tuple[Addition, ...]:
    """Return what options add to the model, with files that are there, in the order of stages."""
    added: list[Addition] = []
    if options.lora_config is not None:
        added.append(_made_by("lora", "lora_config", options.lora_config))
    if options.speculative_config is not None:
        added.append(_made_by("speculation", "speculative_config", options.speculative_config))
    on_host = options.prepare_embedding_lut or any(one.on_host for one in added)
    if "embedding_datatype" in options.model_fields_set and not on_host:
        reason = "it is of the table that prepare_embedding_lut leaves to the host; set both"
        raise InvalidOptionError("embedding_datatype", reason, ())
    if on_host and options.split_model.split_embedding:
        reason = "prepare_embedding_lut leaves no embedding in the graphs to split off"
        raise InvalidOptionError("split_model.split_embedding", reason, ())
    if on_host:  # last: forecast tokens have rows in it
        added.append(HostTable(options.embedding_datatype))
    if options.op_packages:
        host = host_libraries(options.op_packages)
        packages = select_packages(options.op_packages, target)
        added.append(OwnOperations(packages, host, added_operations(host, toolchain)))
    return tuple(added)


def _made_by(
    plugin: str, option: str, config: LoraBuilderInputConfig | SpeculativeConfig
) -> Addition:
    make = cast("Callable[[object], Addition] | None", load_entry(DOOR, plugin))
    if make is None:
        raise InvalidOptionError(option, f"it needs the plugin `{plugin}`", ())
    return make(config)


def draft_binary(name: str) -> str:
    """Return the name of the context binary of the model that drafts for another."""
    return f"{name}_draft.bin"


def options_of(
    section: str, config: LoraBuilderInputConfig | SpeculativeConfig
) -> dict[str, OptionValue]:
    """Return the options of a section under dotted keys, and of what kind it is."""
    values = config.model_dump(mode="json").items()
    return {section: type(config).__name__} | {
        f"{section}.{key}": tuple(value) if isinstance(value, list) else value
        for key, value in values
    }
