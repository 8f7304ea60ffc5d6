"""Configuration files of Genie and its tools: the kind of each, and the parser that judges it.

Keys: the JSON pages of GenieEngine, GenieSampler, GenieProfile and GenieAccuracy, docs.qualcomm.com
80-63442-10.
"""

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from buildlib.config_model import (
    WRITTEN,
    ConfigModel,
    Count,
    GenieBlock,
    Text,
    Version,
    read_config,
    refuse,
)
from buildlib.container.genie_config import (
    Context,
    DialogBlock,
    Embedding,
    GenieConfig,
    GenieDatatype,
    QuantParam,
    Tokenizer,
)
from buildlib.container.genie_decoding import Sampler
from buildlib.container.genie_engine import Engine, ModelBlock, Role
from buildlib.container.genie_validator import (
    DIALOG,
    EMBEDDING,
    EXTENSIONS,
    NODE,
    GenieFunction,
    GenieVerdict,
    ask_genie,
)
from buildlib.container.htp_config import BackendExtensionsConfig, HtpConfig
from buildlib.container.text_embedding import (
    EncoderBackend,
    EncoderContext,
    EncoderEngine,
    EncoderHtp,
    PromptTemplate,
    TextEmbeddingConfig,
)
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


class TextGenerator(DialogBlock):
    """A dialog as a node of a pipeline."""


class TextGeneratorConfig(GenieBlock):
    """Configuration of a `GenieNode` that generates text, from text or from embeddings."""

    text_generator: TextGenerator


class LookupTable(GenieBlock):
    """Embedding vectors of tokens, of length `size`."""

    version: Version = 1
    lut_path: Text | None = None
    size: Count
    datatype: GenieDatatype | None = None
    quant_param: QuantParam | None = None


class VisionParam(GenieBlock):
    """Size of an image in patches, of which each has a position."""

    height: Count | None = None
    width: Count | None = None


class NodeModel(ModelBlock):
    """Files of an encoder of texts or images."""

    vision_param: VisionParam | None = None


class NodeHtp(EncoderHtp):
    """The HTP backend of an encoder of a pipeline, which hands on all that its graph gives."""

    pooled_output: bool | None = None


class NodeBackend(EncoderBackend):
    """Backend of an encoder of a pipeline."""

    qnn_htp: Annotated[NodeHtp | None, Field(alias="QnnHtp")] = None


class NodeEngine(EncoderEngine):
    """Engine that runs an encoder of texts or images."""

    mode: str | None = None
    backend: NodeBackend
    model: NodeModel


class EncoderNode(GenieBlock):
    """An encoder, or a table (`lut`), whose vectors a text generator reads."""

    version: Version = 1
    type: str | None = None
    context: EncoderContext | None = None
    prompt: PromptTemplate | None = None
    tokenizer: Tokenizer | None = None
    truncate_input: bool | None = None
    lut: LookupTable | None = None
    engine: NodeEngine | None = None


class TextEncoderConfig(GenieBlock):
    """Configuration of a `GenieNode` that embeds text."""

    text_encoder: EncoderNode


class ImageEncoderConfig(GenieBlock):
    """Configuration of a `GenieNode` that embeds images."""

    image_encoder: EncoderNode


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
    *(
        ConfigKind(f"{name} node", (name,), model, GenieFunction(NODE, f"/{name}"))
        for name, model in (
            ("text-generator", TextGeneratorConfig),
            ("text-encoder", TextEncoderConfig),
            ("image-encoder", ImageEncoderConfig),
        )
    ),
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
        kind: `None` if it cannot be told; then `ours` has the reason.
        ours: faults that our model finds.
        genie: Genie's verdict; `None` if it has no parser for this kind, or was not asked.
    """

    path: Path
    kind: ConfigKind | None
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
        return None if self.ours or self.kind is None else self.kind.model.from_file(self.path)


def kind_of(text: bytes, path: str) -> ConfigKind:
    """Tell the kind of a configuration by its outermost keys."""
    try:
        values = json.loads(text.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError) as error:
        comment = ", which has no comments" if b"//" in text or b"/*" in text else ""
        raise InputFileError(path, f"it is not valid JSON{comment}: {error}") from error
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
    """Let our models and Genie judge files, each by itself.

    Args:
        paths: of the files, of any kinds.
        ask: Genie too.

    Raises:
        ToolchainMissingError: there is no Genie on this machine.
        ToolchainError: Genie cannot be asked.
    """
    found = [_read(path) for path in paths]
    questions = [
        (index, (kind.genie, text))
        for index, (kind, text, _) in enumerate(found)
        if ask and kind is not None and kind.genie is not None
    ]
    verdicts = ask_genie([question for _, question in questions]) if questions else []
    by_index = dict(zip((index for index, _ in questions), verdicts, strict=True))
    return [
        Judgement(path, kind, ours, by_index.get(index))
        for index, (path, (kind, _, ours)) in enumerate(zip(paths, found, strict=True))
    ]


def _read(path: Path) -> tuple[ConfigKind | None, bytes, tuple[Fault, ...]]:
    """Return the kind of a file, its text, and the faults that our model finds in it."""
    try:
        text = read_config(path)
        kind = kind_of(text, str(path))
    except InputFileError as error:
        return None, b"", (Fault((), "unreadable", error.reason),)
    return kind, text, kind.model.faults_of(text)
