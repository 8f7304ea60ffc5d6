"""`BuildOptions`: every option of a build, declared once, and the dotted keys that set them.

Builders, command line, option files, recipes and plans use the same keys:

    arn_cl_options.context_length: 192
    graphs.vtcm_size_in_mb: 4
    speculative_config.draft_model_path: draft_model.onnx
    prepare_embedding_lut: true
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from buildlib.builder.lora_config import LoraBuilderInputConfig
from buildlib.builder.options import (
    ARnContextLengthConfig,
    MhaConfig,
    OptionValue,
    PositiveInt,
    SplitModelConfig,
)
from buildlib.builder.speculative_config import SPECULATIONS, SpeculativeConfig, speculation_of
from buildlib.container.op_packages import OpPackage
from buildlib.embedding.config import EmbedDatatype
from buildlib.errors import InvalidOptionError, UnknownOptionError
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.techniques.arguments import TechniqueArguments
from buildlib.targets import Target
from buildlib.toolchains.compile_config import CompileConfig
from buildlib.toolchains.htp_extensions import HTP_KINDS, HtpConfigHelper
from buildlib.validation import NoEffect, first_fault, without_effect

TRANSFORMATION = ("arn_cl_options", "split_model", "mha2sha")
CONVERSION = ("quantization",)
COMPILATION = ("context", "devices", "graphs", "groupContext", "memory")
SETS = (*TRANSFORMATION, *CONVERSION, *COMPILATION)
"""Sections of the three sets of options that the vendor's builder has."""
_KINDS = tuple(SPECULATIONS.values())


def _lora(value: object) -> object:
    return LoraBuilderInputConfig.create(**value) if isinstance(value, dict) else value


def _speculation(value: object) -> object:
    if isinstance(value, dict):
        return speculation_of(value)
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    reason = f"{type(value).__name__} is none of its kinds"
    names = tuple(kind.__name__ for kind in _KINDS)
    raise InvalidOptionError("speculative_config", reason, names)


class BuildOptions(BaseModel):
    """Options of a build, by section, and attributes of a builder.

    `model_fields_set`, of a section too, are the options that the user set.

    Attributes:
        compilation: by dotted keys, as set; defaults depend on the target.
        lora_config: adapters to build in; embedding and head are then parts of their own.
        speculative_config: kind of speculative decoding.
        prepare_embedding_lut: leave the embedding out of the graphs; the host looks tokens up.
        embedding_datatype: of that table.
        skip_ar_conversion: keep the AR of the model, at every context length.
            `arn_cl_options.skip_ar_cl_conversion` keeps its context length too.
        op_packages: libraries with operations of your own, which the container takes along.
        max_kl: refuse a quantization whose KL divergence from the model in float, on the
            calibration text, is above so many nats.
        max_workers: parts built at once; by default as many as there are cores and memory for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    arn_cl_options: ARnContextLengthConfig = ARnContextLengthConfig()
    split_model: SplitModelConfig = SplitModelConfig()
    mha2sha: MhaConfig = MhaConfig()
    quantization: QuantizationOptions = QuantizationOptions()
    compilation: Mapping[str, object] = Field(default_factory=dict)
    lora_config: Annotated[LoraBuilderInputConfig | None, BeforeValidator(_lora)] = None
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(_speculation)] = None
    prepare_embedding_lut: bool = False
    embedding_datatype: EmbedDatatype = "uint16"
    skip_ar_conversion: bool = False
    op_packages: tuple[OpPackage, ...] = ()
    max_kl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_workers: PositiveInt | None = None

    def with_options(
        self, options: Mapping[str, object], sections: Collection[str] | None = None
    ) -> Self:
        """Return a copy with dotted keys set, such as `split_model.num_splits`, or sections.

        Args:
            options: their values may be nested mappings.
            sections: those that have the options; by default any.

        Raises:
            InvalidOptionError: a key that does not exist or is not honoured here, or a value that
                it cannot take; names the key. A target can refuse more of `compilation`.
        """
        values: dict[str, Any] = {name: getattr(self, name) for name in self.model_fields_set}
        keys = known_options(sections)
        for given, value in by_dotted_keys(options):
            key = HtpConfigHelper.full_key(given)
            if key in _NOT_HONOURED:
                raise InvalidOptionError(key, _NOT_HONOURED[key], ())
            if key == _BIAS_BITS and value == _UNKNOWN_BIAS_BITS:
                raise InvalidOptionError(key, _BIAS_REASON, ())
            if key not in keys:
                raise UnknownOptionError(key, keys)
            if key.startswith(_COMPILATION_KEYS):
                values["compilation"] = {**values.get("compilation", {}), key: value}
                continue
            *path, name = key.split(".")
            inner = values
            for section in path:
                inner[section] = inner = _as_dict(inner.get(section))
            inner[name] = value
        try:
            return type(self).model_validate(values)
        except ValidationError as error:
            fault = first_fault(error, type(self))
            raise InvalidOptionError(fault.key, fault.reason, ()) from error

    def as_options(self) -> dict[str, OptionValue]:
        """Return the options of transformation and conversion under their dotted keys."""
        return dict(by_dotted_keys(self.model_dump(include={*TRANSFORMATION, *CONVERSION})))

    def used_options(self) -> dict[str, OptionValue]:
        """Return the same but for arguments of techniques that are not applied."""
        applied = self.quantization.weight_techniques
        others = tuple(
            f"quantization.technique_kwargs.{name}."
            for name in TechniqueArguments.model_fields
            if name not in applied
        )
        return {key: one for key, one in self.as_options().items() if not key.startswith(others)}

    def compile_config(self, target: Target) -> CompileConfig:
        """Return all compilation options for a target."""
        return CompileConfig.for_target(target).with_options(self.compilation)


def known_options(sections: Collection[str] | None = None) -> tuple[str, ...]:
    """Return the dotted keys of sections, or of all options."""
    sets = {*TRANSFORMATION, *CONVERSION, "compilation"}
    keys = (
        *BuildOptions().as_options(),
        *HtpConfigHelper.list_config_options(),
        *(name for name in BuildOptions.model_fields if name not in sets),
        *(f"lora_config.{name}" for name in LoraBuilderInputConfig.model_fields),
        "speculative_config.type",
        *(f"speculative_config.{name}" for kind in _KINDS for name in kind.model_fields),
    )
    selection = (key for key in keys if sections is None or key.partition(".")[0] in sections)
    return tuple(dict.fromkeys(selection))


def no_effects() -> dict[str, NoEffect]:
    """Return the options that change nothing, by their dotted keys."""
    found = dict(without_effect(BuildOptions))
    for kind in HTP_KINDS:
        found |= without_effect(kind, f"{kind.SECTION}.")
    return found


def by_dotted_keys(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield options under dotted keys; values may stand in nested mappings."""
    for key, value in options.items():
        is_whole = key in _NOT_HONOURED or (not value and key in _ADDITIONS)
        if isinstance(value, Mapping) and not is_whole:
            yield from by_dotted_keys({f"{key}.{name}": one for name, one in value.items()})
        else:
            yield key, value


def _as_dict(section: object) -> dict[str, Any]:
    if isinstance(section, BaseModel):
        return section.model_dump(exclude_unset=True)
    return dict(section) if isinstance(section, Mapping) else {}


_ADDITIONS = frozenset({"lora_config", "speculative_config"})
"""Sections that are built in where they are there, so that an empty one is not like none."""
_COMPILATION_KEYS = tuple(f"{section}." for section in COMPILATION)
# Documented options that mean nothing here, or that no code here can honour.
_NOT_HONOURED: Mapping[str, str] = {
    "arn_cl_options.axis_denotation_config": "axes are found in the graph; leave it out",
    "split_model.lm_head_input_name": "the output projection is found in the graph; leave it out",
    "split_model.input_ids_name": "inputs are recognised by what they are; leave it out",
    "split_model.input_embeds_name": "inputs are recognised by what they are; leave it out",
    "split_model.skip_verification": "nothing is verified unless asked: call verify()",
    "adapt_moe": "mixtures of experts are not built here; the QAIRT SDK builds them",
}
_BIAS_BITS = "quantization.bias_bitwidth"
_UNKNOWN_BIAS_BITS = 8
_BIAS_REASON = "onnxruntime-qnn compiles biases of 32 bits alone; 8 need the QAIRT SDK's toolchain"
