"""Configuration files of Genie and its tools: the kind of each, and the parser that judges it.

Keys: the JSON pages of GenieEngine, GenieSampler, GenieProfile and GenieAccuracy, docs.qualcomm.com
80-63442-10.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import model_validator

from buildlib.config_model import (
    WRITTEN,
    ConfigModel,
    GenieBlock,
    Text,
    Version,
    read_config,
    refuse,
)
from buildlib.container.genie_config import Context, Embedding, GenieConfig
from buildlib.container.genie_decoding import Sampler
from buildlib.container.genie_engine import Engine, Role
from buildlib.container.genie_validator import (
    DIALOG,
    EMBEDDING,
    EXTENSIONS,
    GenieFunction,
    GenieVerdict,
    ask_genie,
)
from buildlib.container.htp_config import BackendExtensionsConfig, HtpConfig
from buildlib.container.text_embedding import TextEmbeddingConfig
from buildlib.errors import InputFileError
from buildlib.validation import Fault, nearest_key


class StandaloneEngine(GenieBlock):
    """An engine that is bound to a dialog at run time."""

    version: Version = 1
    context: Context
    embedding: Embedding | None = None
    engine: Engine


class EngineConfig(GenieBlock):
    """Configuration of `GenieEngine`."""

    standalone_engine: StandaloneEngine


class SamplerConfig(GenieBlock):
    """Configuration of `GenieSampler`, for a dialog that is there already."""

    sampler: Sampler


class TraceOptions(GenieBlock):
    """Trace of the calls of Genie."""

    version: Version = 1
    enable: Annotated[bool, WRITTEN] = True


class Profile(GenieBlock):
    """Options of profiling."""

    version: Version = 1
    trace: TraceOptions | None = None


class ProfileConfig(GenieBlock):
    """Configuration of `GenieProfile`."""

    profile: Profile


class AccuracyEngine(GenieBlock):
    """Engine that is scored; dialogs that are not basic need `convert_to_basic`."""

    convert_to_basic: bool | None = None
    role: Role | None = None

    @model_validator(mode="after")
    def _converts_or_says_nothing(self) -> Self:
        if self.convert_to_basic is False:
            raise refuse("must be true, or not be there", "convert-to-basic")
        return self


class AccuracyConfig(GenieBlock):
    """Configuration of `GenieAccuracy`; `dataset` is the file of a text."""

    dataset: Text
    type: Annotated[Literal["perplexity"], WRITTEN] = "perplexity"
    engine: AccuracyEngine | None = None


@dataclass(frozen=True)
class ConfigKind:
    """A kind of configuration file.

    Attributes:
        name: in words.
        keys: of the outermost object; one of them tells the kind.
        model: ours.
        genie: the function that reads it; `None` if there is none.
    """

    name: str
    keys: tuple[str, ...]
    model: type[ConfigModel]
    genie: GenieFunction | None = None

    @property
    def judge(self) -> str:
        """The library that judges it."""
        return "QNN's HTP library" if self.genie == EXTENSIONS else "libGenie"


def _parser(name: str, root: str = "") -> GenieFunction:
    return GenieFunction(f"Genie{name}Config_createFromJson", root)


KINDS = (
    ConfigKind("dialog", ("dialog",), GenieConfig, DIALOG),
    ConfigKind("text-to-embedding", ("embedding",), TextEmbeddingConfig, EMBEDDING),
    ConfigKind("engine", ("standalone-engine",), EngineConfig, _parser("Engine")),
    ConfigKind("sampler", ("sampler",), SamplerConfig, _parser("Sampler", "/sampler")),
    ConfigKind("profile", ("profile",), ProfileConfig, _parser("Profile")),
    ConfigKind("accuracy", ("dataset", "type", "engine"), AccuracyConfig, _parser("Accuracy")),
    ConfigKind("qnn-net-run extensions", ("backend_extensions",), BackendExtensionsConfig),
    ConfigKind(
        "HTP backend extensions",
        ("devices", "context", "graphs", "memory", "groupContext"),
        HtpConfig,
        EXTENSIONS,
    ),
)


@dataclass(frozen=True)
class Judgement:
    """Verdicts of our models and of Genie on one file.

    Attributes:
        ours: faults that our model finds.
        genie: Genie's verdict; `None` if it has no parser for this kind, or was not asked.
    """

    path: Path
    kind: ConfigKind
    ours: tuple[Fault, ...]
    genie: GenieVerdict | None

    @property
    def accepted(self) -> bool:
        """True if nobody refuses it."""
        return not self.ours and (self.genie is None or not self.genie.faults)

    @property
    def remarks(self) -> tuple[Fault, ...]:
        """Notes on what both take: it has another effect than its reader may think."""
        return () if self.config is None else tuple(self.config.remarks())

    @property
    def config(self) -> ConfigModel | None:
        """The configuration, if our model takes it."""
        return None if self.ours else self.kind.model.from_file(self.path)


def kind_of(text: bytes, path: str) -> ConfigKind:
    """Tell the kind of a configuration by its outermost keys."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputFileError(path, f"it is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputFileError(path, "it is no JSON object")
    for kind in KINDS:
        if not values.keys().isdisjoint(kind.keys):
            return kind
    keys = {key: key for kind in KINDS for key in kind.keys}
    near = next(filter(None, (nearest_key(key, keys) for key in values)), None)
    hint = f": did you mean {near}?" if near else f" (one of {', '.join(keys)} tells it)"
    raise InputFileError(path, f"its kind cannot be told{hint}")


def judge_files(paths: Sequence[Path], *, ask: bool = True) -> list[Judgement]:
    """Let our models and Genie judge files.

    Args:
        paths: of the files, of any kinds.
        ask: Genie too.

    Raises:
        InputFileError: a file cannot be read, or its kind cannot be told.
        ToolchainMissingError: there is no Genie on this machine.
        ToolchainError: Genie cannot be asked.
    """
    texts = [read_config(path) for path in paths]
    kinds = [kind_of(text, str(path)) for text, path in zip(texts, paths, strict=True)]
    questions = [index for index, kind in enumerate(kinds) if ask and kind.genie is not None]
    verdicts = (
        ask_genie([(function, texts[i]) for i in questions if (function := kinds[i].genie)])
        if questions
        else []
    )
    by_index = dict(zip(questions, verdicts, strict=True))
    return [
        Judgement(path, kind, kind.model.faults_of(text), by_index.get(index))
        for index, (path, kind, text) in enumerate(zip(paths, kinds, texts, strict=True))
    ]
