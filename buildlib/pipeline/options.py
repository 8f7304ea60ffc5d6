"""The builder's options in the vendor's vocabulary, and the dotted keys that set them.

Names and defaults: `BuilderTransformerConfig` and its parts, docs.qualcomm.com 80-87189-2
(`genai_builder_configuration`).
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)

from buildlib.errors import InvalidOptionError, UnknownOptionError
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.techniques.arguments import TechniqueArguments
from buildlib.validation import first_fault

OptionValue = str | int | float | bool | None | tuple[str | int | float | bool | None, ...]

PositiveInt = Annotated[int, Field(ge=1)]


class Options(BaseModel):
    """Options in sections, each a model of its own, set by dotted keys.

    `model_fields_set` of a section are the options that the user set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    def with_options(self, options: Mapping[str, object]) -> Self:
        """Return a copy with dotted keys set, such as `split_model.num_splits`, or sections.

        Raises:
            InvalidOptionError: a key that does not exist or is not honoured here, or a value that
                it cannot take; names the key.
        """
        values: dict[str, Any] = self.model_dump(exclude_unset=True)
        known = tuple(self.as_options())
        for key, value in by_dotted_keys(options):
            if key in _NOT_HONOURED:
                raise InvalidOptionError(key, _NOT_HONOURED[key], ())
            if key == _BIAS_BITS and value == _UNKNOWN_BIAS_BITS:
                raise InvalidOptionError(key, _BIAS_REASON, ())
            if key not in known:
                raise UnknownOptionError(key, known)
            *sections, name = key.split(".")
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
        try:
            return type(self).model_validate(values)
        except ValidationError as error:
            fault = first_fault(error, type(self))
            raise InvalidOptionError(fault.key, fault.reason, ()) from error

    def as_options(self) -> dict[str, OptionValue]:
        """Return all options under their dotted keys."""
        return dict(by_dotted_keys(self.model_dump()))


OneOrMore = Annotated[
    tuple[PositiveInt, ...], BeforeValidator(lambda given: [given] if type(given) is int else given)
]
"""Numbers, of which one may stand without brackets."""


class ARnContextLengthConfig(Options):
    """Shapes of the graphs: one for each AR (tokens per call) at each context length.

    Attributes:
        skip_ar_cl_conversion: keep the one (AR, CL) that the model has.
    """

    auto_regression_number: OneOrMore = Field(default=(1, 128), min_length=1)
    context_length: OneOrMore = Field(default=(4096,), min_length=1)
    skip_ar_cl_conversion: bool = False


class SplitModelConfig(Options):
    """Options of the split into parts at layer boundaries.

    Attributes:
        num_splits: number of parts; `None` chooses it by the size of the weights.
        split_embedding: the embedding is a part of its own.
        split_lm_head: the output projection is a part of its own.
    """

    num_splits: PositiveInt | None = None
    split_embedding: bool = False
    split_lm_head: bool = False


class M2sStartPoint(BaseModel):
    """An operator of the user's ONNX where attention begins."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1)]


_StartPoint = Annotated[
    M2sStartPoint,
    BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value),
    PlainSerializer(lambda point: point.name, return_type=str),
]


class MhaConfig(Options):
    """Options of turning multi-head attention into single-head attention.

    Attributes:
        m2s_additional_start_points: checked against the ONNX; every attention is found without.
    """

    enabled: bool = True
    m2s_additional_start_points: tuple[_StartPoint, ...] = ()


class ModelTransformerConfig(Options):
    """Transformations of the ONNX before it is converted."""

    arn_cl_options: ARnContextLengthConfig = ARnContextLengthConfig()
    split_model: SplitModelConfig = SplitModelConfig()
    mha2sha: MhaConfig = MhaConfig()


class ConversionConfig(Options):
    """Options of quantization and of the conversion to DLCs."""

    quantization: QuantizationOptions = QuantizationOptions()

    def used_options(self) -> dict[str, OptionValue]:
        """Return all options but the arguments of techniques that are not applied."""
        applied = self.quantization.weight_techniques
        others = tuple(
            f"quantization.technique_kwargs.{name}."
            for name in TechniqueArguments.model_fields
            if name not in applied
        )
        return {key: one for key, one in self.as_options().items() if not key.startswith(others)}


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


def by_dotted_keys(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield options under dotted keys, whose values may stand in nested mappings."""
    for key, value in options.items():
        if isinstance(value, Mapping) and key not in _NOT_HONOURED:
            yield from by_dotted_keys({f"{key}.{name}": one for name, one in value.items()})
        else:
            yield key, value
