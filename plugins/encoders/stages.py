"""Stages of the build of a text encoder: export, import, quantize, compile, package."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from buildlib.builder.original_paths import original_paths
from buildlib.builder.plan import BuildPlan
from buildlib.builder.sources import CheckpointSource, OnnxSource
from buildlib.builder.stage import CachedStage
from buildlib.builder.stages.package import CONTAINER
from buildlib.cache.key import combined_sha256, text_sha256
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.layout import ENCODINGS_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.checkpoint.tokenizer import untrimmed_file
from buildlib.container.genie_engine import Binaries, ModelBlock
from buildlib.container.manifest import (
    HTP_CONFIG,
    GraphsRecord,
    ModelRecord,
    binary_name,
    plain_name,
)
from buildlib.container.text_embedding import (
    EncoderBackend,
    EncoderContext,
    EncoderEngine,
    EncoderHtp,
    PromptTemplate,
    TextEmbedding,
    TextEmbeddingConfig,
)
from buildlib.container.writer import ContainerContents, htp_config, write_container
from buildlib.encodings.files import format_modules, load_encodings, save_encodings
from buildlib.encodings.model import Encodings
from buildlib.entry_points import entry_modules
from buildlib.files import atomic_write_bytes
from buildlib.graph.files import load_model
from buildlib.graph.values import static_shape
from buildlib.numerics.transformers import installed_versions
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.options import DOOR, QuantizationOptions
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.recipe import encodings_from_ranges
from buildlib.quantize.summary import summarize_quantization
from buildlib.targets import Target
from buildlib.toolchains.base import Toolchain
from buildlib.toolchains.compile_config import CompileConfig
from plugins.encoders import interface
from plugins.encoders.calibration import (
    calibration_tokens,
    observe_encoder,
    round_weights,
    rounding_technique,
)
from plugins.encoders.export import export_encoder
from plugins.encoders.inputs import TextTokens
from plugins.encoders.onnx_import import import_encoder

GRAPH = "encoder"
"""Name of the graph, and of its files."""


@dataclass(frozen=True)
class EncoderModel:
    """An encoder that is built.

    Attributes:
        files: SHA-256 of its files by name.
        length: tokens of the longest text.
        pooling: how tokens become one vector.
    """

    export: OnnxSource
    config: interface.EncoderConfig
    files: Mapping[str, str]
    length: int
    pooling: interface.Pooling

    @property
    def tokens(self) -> TextTokens:
        """Tokens of its texts."""
        template = interface.prompt_template(self.export.tokenizer)
        return TextTokens(self.export.tokenizer, template, self.length)


@dataclass(frozen=True)
class ExportEncoder(CachedStage):
    """A checkpoint's encoder as ONNX, for texts of any length."""

    operation = "export"
    checkpoint: CheckpointSource
    files: Mapping[str, str]

    @property
    def subject(self) -> str:
        return self.checkpoint.name

    @property
    def source(self) -> Path:
        return self.checkpoint.folder

    @property
    def options(self) -> Mapping[str, object]:
        return installed_versions()

    def run(self, folder: Path) -> None:
        export_encoder(self.checkpoint.folder, folder / MODEL_FILE)


@dataclass(frozen=True)
class ImportEncoder(CachedStage):
    """The encoder at one length, with the inputs and outputs that Genie knows."""

    operation = "import"
    model: EncoderModel

    @property
    def subject(self) -> str:
        return f"{GRAPH} of {self.model.length} tokens"

    @property
    def source(self) -> Path:
        return self.model.export.model

    @property
    def options(self) -> Mapping[str, object]:
        return {"length": self.model.length, **asdict(self.model.pooling)}

    @property
    def inputs(self) -> tuple[str, ...]:
        return (combined_sha256(self.model.files),)

    def run(self, folder: Path) -> None:
        import_encoder(self.source, folder / MODEL_FILE, self.model.length, self.model.pooling)


@dataclass(frozen=True)
class QuantizeEncoder(CachedStage):
    """The imported encoder in integers, with encodings calibrated on text of all lengths."""

    operation = "quantize"
    model: EncoderModel
    imported: CacheEntry
    quantization: QuantizationOptions

    @property
    def subject(self) -> str:
        return GRAPH

    @property
    def source(self) -> Path:
        return self.imported.folder / MODEL_FILE

    @property
    def options(self) -> Mapping[str, object]:
        text = self.model.export.calibration_text
        return {
            "quantization": self.quantization,
            "calibration_sha256": text_sha256(text) if text else None,
            "padding": self.model.config.padding,
        }

    @property
    def inputs(self) -> tuple[str, ...]:
        files = self.model.files
        encodings = [files[ENCODINGS_FILE]] if ENCODINGS_FILE in files else []
        return (self.imported.hash, files[TOKENIZER_FILE], *encodings)

    @property
    def modules(self) -> tuple[str, ...]:
        techniques = entry_modules(DOOR, self.quantization.weight_techniques)
        return *super().modules, *format_modules(), *techniques

    def run(self, folder: Path) -> None:
        export, source = self.model.export, self.source
        padding, text = self.model.config.padding, export.calibration_text
        bits = Bitwidths.from_options(self.quantization)
        technique = rounding_technique(self.quantization)
        with original_paths(export), tempfile.TemporaryDirectory(prefix="qnnfarm-") as scratch:
            encodings = (
                Encodings() if export.encodings is None else load_encodings(export.encodings)
            )
            windows = list(calibration_tokens(self.model.tokens, text)) if text else []
            if technique is not None and windows:
                source, encodings = round_weights(
                    source, encodings, windows, padding, technique, bits, Path(scratch)
                )

            def observe() -> Mapping[str, tuple[float, float]]:
                width = bits.act_bitwidth
                return observe_encoder(source, windows, padding, Path(scratch), width)

            encodings = encodings_from_ranges(source, encodings, observe if text else None, bits)
            save_encodings(encodings, folder / ENCODINGS_FILE)
            apply_encodings(source, encodings, folder / f"{GRAPH}.qdq.onnx")


@dataclass(frozen=True)
class CompileEncoder(CachedStage):
    """The context binary of an encoder."""

    operation = "compile"
    compiles = True
    quantized: CacheEntry
    config: CompileConfig
    target: Target
    binary: str
    toolchain: Toolchain

    @property
    def subject(self) -> str:
        return GRAPH

    @property
    def source(self) -> Path:
        return self.quantized.folder / f"{GRAPH}.qdq.onnx"

    @property
    def options(self) -> Mapping[str, object]:
        return self.config.compiled_part().model_dump(mode="json") | {"target": str(self.target)}

    def run(self, folder: Path) -> None:
        binary, dlc = folder / self.binary, folder / f"{GRAPH}.dlc"
        renamed = {binary: Path(binary.name), dlc: Path(dlc.name)}
        with original_paths(None, renamed):
            self.toolchain.convert(self.source, dlc, self.target)
            self.toolchain.compile([dlc], binary, self.config)


@dataclass(frozen=True)
class PackageEncoder(CachedStage):
    """The container of an encoder; Genie judges its configuration before it appears."""

    operation = "package"
    compiles = True
    model: EncoderModel
    plan: BuildPlan
    imported: CacheEntry
    quantized: CacheEntry
    compiled: CacheEntry
    toolchain_versions: Mapping[str, str]

    @property
    def subject(self) -> str:
        return str(self.plan.target)

    @property
    def source(self) -> Path:
        return self.model.export.folder

    @property
    def options(self) -> Mapping[str, object]:
        return {
            "target": str(self.plan.target),
            "model": self.model.export.name,
            "options": self.plan.as_options(),
            "htp_config": json.loads(htp_config(self.plan.compilation).to_json()),
        }

    @property
    def inputs(self) -> tuple[str, ...]:
        return (combined_sha256(self.model.files), self.quantized.hash, self.compiled.hash)

    @property
    def binary(self) -> str:
        """Name of the context binary."""
        return encoder_binary(self.model.export.name)

    def configuration(self) -> TextEmbeddingConfig:
        """Return the embedding: sizes of the encoder, and special tokens around texts."""
        graph = load_model(self.imported.folder / MODEL_FILE).graph
        shape = static_shape(graph.outputs[-1]) or (1, 1)
        context = EncoderContext(
            n_vocab=self.model.config.vocab_size,
            ctx_size=self.model.length,
            embed_size=shape[-1],
            pad_token=self.model.config.padding,
        )
        target = self.plan.target
        template = self.model.tokens.template
        return text_embedding(context, [self.binary], template, emulator=target.emulator)

    def run(self, folder: Path) -> None:
        plan, model = self.plan, self.model
        tokenizer = folder / TOKENIZER_FILE  # Genie obeys its padding, beyond the context too
        atomic_write_bytes(tokenizer, untrimmed_file(model.export.tokenizer))
        length = model.length
        draft = ContainerContents(
            target=plan.target,
            model=ModelRecord(
                name=plain_name(model.export.name),
                architecture=model.config.model_type,
                inputs=model.files,
                quantization=summarize_quantization([self.quantized.folder / f"{GRAPH}.qdq.onnx"]),
            ),
            graphs=GraphsRecord(auto_regression_numbers=(length,), context_length=length, splits=1),
            genie_config=self.configuration(),
            htp_config=htp_config(plan.compilation),
            tokenizer=tokenizer,
            binaries={self.binary: self.compiled.folder / self.binary},
            toolchain=self.toolchain_versions,
            options=plan.as_options(),
        )
        write_container(draft, folder / CONTAINER)
        tokenizer.unlink()


def encoder_binary(name: str) -> str:
    """Return the name of the context binary of an encoder."""
    return binary_name(name, 1, 1)


def text_embedding(
    context: EncoderContext,
    ctx_bins: Sequence[str],
    template: tuple[str, str],
    *,
    emulator: bool,
) -> TextEmbeddingConfig:
    """Return the configuration of an encoder with a pooled output."""
    htp = EncoderHtp(use_mmap=not emulator, disable_kv_cache=True)
    return TextEmbeddingConfig(
        embedding=TextEmbedding(
            context=context,
            prompt=PromptTemplate(prompt_template=template),
            truncate_input=True,
            engine=EncoderEngine(
                n_threads=3,
                backend=EncoderBackend(qnn_htp=htp, extensions=HTP_CONFIG),
                model=ModelBlock(binary=Binaries(ctx_bins=tuple(ctx_bins))),
            ),
        )
    )
