"""`package`: configurations, manifest and binaries as one container."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buildlib.builder.additions import Composition, DialogFacts, PreparedModel
from buildlib.builder.lora_config import BEYOND_FILE
from buildlib.builder.model_folder import load_factors, load_loss
from buildlib.builder.plan import BuildPlan
from buildlib.builder.stage import CachedStage
from buildlib.cache.key import combined_sha256
from buildlib.cache.layout import CacheEntry
from buildlib.checkpoint.config import NO_BOS, DecoderConfig, load_config
from buildlib.checkpoint.generation import GenerationConfig, load_generation
from buildlib.checkpoint.layout import CONFIG_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.checkpoint.rotary import DynamicRopeScaling, LinearRopeScaling, Llama3RopeScaling
from buildlib.container.chat_template import TOKENIZER_CONFIG, ChatTemplate
from buildlib.container.genie_config import Context, GenieConfig, basic_dialog
from buildlib.container.genie_decoding import GREEDY, SPECULATIVE, Sampler, TokenPenalty
from buildlib.container.genie_engine import RopeScaling
from buildlib.container.manifest import (
    CLIPPED_ADAPTERS,
    HIDDEN_STATES,
    RESCALED,
    GraphsRecord,
    ModelRecord,
    SpeculationRecord,
    plain_name,
)
from buildlib.container.writer import ContainerContents, ContainerFile, htp_config, write_container
from buildlib.errors import ModelWarning, ToolchainError
from buildlib.files import atomic_write_bytes
from buildlib.graph.rope import frequency_divisors
from buildlib.quantize.summary import describe_factors, summarize_quantization
from buildlib.quantize.techniques.spreading import describe_spreading
from buildlib.targets import Target

CONTAINER = "container"
"""Folder in that of the stage with the container."""


@dataclass(frozen=True)
class Package(CachedStage):
    """The container of a build; Genie judges its configuration before it appears.

    Attributes:
        prepared: the model that it was made of.
        quantized: parts as QDQ ONNX, at one (AR, CL) of each model that was built; they tell how
            weights are stored.
        compiled: parts in the order of data flow, and a draft head.
        binaries: their context binaries.
        files: SHA-256 of the build's inputs, by name.
        extra_files: SHA-256 of the files beside binaries and tokenizer, by name.
        toolchain_versions: name and versions of everything that compiled.
        chat_template: that of the model; `files` covers it.
        origin: of a model of the hub.
    """

    operation = "package"
    compiles = True
    plan: BuildPlan
    model_name: str
    prepared: PreparedModel
    composition: Composition
    quantized: Sequence[Path]
    compiled: Sequence[CacheEntry]
    binaries: Sequence[Path]
    files: Mapping[str, str]
    extra_files: Mapping[str, str]
    toolchain_versions: Mapping[str, str]
    chat_template: ChatTemplate | None = None
    origin: str | None = None

    @property
    def subject(self) -> str:
        return str(self.plan.target)

    @property
    def source(self) -> Path:
        return self.prepared.model

    @property
    def options(self) -> Mapping[str, object]:
        return {
            "target": str(self.plan.target),
            "model": self.model_name,
            "options": self.plan.as_options(),
            "genie_config": json.loads(self.composition.genie_config.to_json()),
            "htp_config": json.loads(htp_config(self.plan.compilation).to_json()),
            **({} if self.origin is None else {"origin": self.origin}),
        }

    @property
    def inputs(self) -> tuple[str, ...]:
        return (
            combined_sha256(self.files),
            combined_sha256(self.extra_files),
            *(entry.hash for entry in self.compiled),
        )

    @property
    def modules(self) -> tuple[str, ...]:
        return *super().modules, *(type(one).__module__ for one in self.plan.additions)

    def run(self, folder: Path) -> None:
        plan, prepared = self.plan, self.prepared
        quantization = summarize_quantization(self.quantized)
        factors = load_factors(prepared.model)
        quantization |= {RESCALED: describe_factors(factors)} if factors else {}
        spread = describe_spreading(prepared.model / MODEL_FILE)
        quantization |= {HIDDEN_STATES: spread} if spread else {}
        if prepared.lora is not None:
            beyond = json.loads((prepared.lora / BEYOND_FILE).read_text("utf-8"))
            quantization |= {CLIPPED_ADAPTERS: ", ".join(beyond)} if beyond else {}
        extras = dict(self.composition.extras)
        if self.chat_template is not None:
            path = folder / TOKENIZER_CONFIG
            atomic_write_bytes(path, self.chat_template.to_json().encode())
            extras[TOKENIZER_CONFIG] = ContainerFile(path, "tokenizer")
        draft = ContainerContents(
            target=plan.target,
            model=ModelRecord(
                name=plain_name(self.model_name),
                origin=self.origin,
                architecture=load_config(prepared.model / CONFIG_FILE).model_type,
                inputs=self.files,
                quantization=quantization,
            ),
            graphs=GraphsRecord(
                auto_regression_numbers=plan.ars,
                context_length=plan.context_lengths[-1],
                context_lengths=plan.context_lengths,
                splits=len(self.binaries),
            ),
            genie_config=self.composition.genie_config,
            htp_config=htp_config(plan.compilation),
            tokenizer=prepared.model / TOKENIZER_FILE,
            binaries={path.name: path for path in self.binaries},
            toolchain=self.toolchain_versions,
            options={**plan.as_options(), "split_model.num_splits": len(self.binaries)},
            extras=extras,
            op_packages=plan.operations.packages,
            contract=plan.contract.name,
            loss=load_loss(prepared.model),
        )
        write_container(draft, folder / CONTAINER, speculation=self._compare)

    def _compare(self, folder: Path) -> SpeculationRecord | None:
        """Compare a dialog that speculates with plain decoding, where the emulator can run it."""
        config = self.composition.genie_config
        if config.dialog.type not in SPECULATIVE or not self.plan.target.emulator:
            return None
        try:
            records = (one.compare(folder, config) for one in self.plan.additions)
            return next((one for one in records if one is not None), None)
        except ToolchainError as error:
            warnings.warn(f"its text was not compared: {error}", ModelWarning, stacklevel=2)
            return None


def compose(plan: BuildPlan, prepared: PreparedModel, ctx_bins: Sequence[str]) -> Composition:
    """Return the dialog of a build's container.

    Args:
        plan: of the build.
        prepared: the model that it was made of.
        ctx_bins: names of the binaries in the order of data flow.
    """
    decoder = load_config(prepared.model / CONFIG_FILE)
    length = plan.context_lengths[-1]
    config = genie_config(decoder, length, ctx_bins, plan.target)
    config = config.with_dialog(sampler=proposed_sampler(load_generation(prepared.model), length))
    made, facts = Composition(config), DialogFacts(plan.target, plan.ars, decoder)
    for addition in plan.additions:
        made = addition.genie(made, prepared, facts)
    return made


def proposed_sampler(generation: GenerationConfig, context_length: int) -> Sampler:
    """Return the sampler that a model's publisher proposes; greedy if he proposes none.

    Programs that open a container's dialog themselves begin with it. Commands of qnnfarm are greedy
    unless they are told otherwise.
    """
    if not generation.do_sample or not generation.temperature or generation.top_k == 1:
        return GREEDY  # at top-k 1 Genie 1.21 applies no penalty
    penalty = None
    if generation.repetition_penalty != 1:
        penalty = TokenPenalty(
            penalize_last_n=context_length, repetition_penalty=generation.repetition_penalty
        )
    return Sampler(
        seed=GREEDY.seed,
        temp=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        token_penalty=penalty,
    )


def genie_config(
    config: DecoderConfig, context_length: int, ctx_bins: Sequence[str], target: Target
) -> GenieConfig:
    """Return the dialog of a decoder: its sizes, its special tokens, its rotary positions."""
    eos = config.eos_token_ids
    local = map(config.has_local_rope, range(config.num_hidden_layers))
    return basic_dialog(
        context=Context(
            size=context_length,
            n_vocab=config.vocab_size,
            bos_token=next(iter(config.begin), NO_BOS),
            eos_token=eos[0] if len(eos) == 1 else eos,
        ),
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim,
        rope_theta=config.rope_theta,
        rope_scaling=genie_rope_scaling(config, context_length),
        ctx_bins=ctx_bins,
        emulator=target.emulator,
        local_rope_theta=config.rope_local_base_freq if any(local) else None,
    )


def genie_rope_scaling(config: DecoderConfig, context_length: int) -> RopeScaling | None:
    """Tell Genie the scaling of rotary positions at a context length.

    Scalings that Genie does not know become its `longrope`, which divides each frequency by a
    number of its own; with a factor of 1 it makes cosines and sines no longer (seen with Genie
    1.21). Both of its lists are the same, so that no length decides between them.
    """
    scaling = config.rope_scaling
    match scaling:
        case None | DynamicRopeScaling():
            return None
        case LinearRopeScaling(factor=factor) | Llama3RopeScaling(factor=factor) if factor >= 1.0:
            return RopeScaling.model_validate(scaling.model_dump())
    divisors = tuple(frequency_divisors(config, context_length).tolist())
    return RopeScaling(
        rope_type="longrope",
        factor=1.0,
        original_max_position_embeddings=context_length,
        short_factor=divisors,
        long_factor=divisors,
    )
