"""Sections of the builder's transformation options, in the vendor's vocabulary.

Names and defaults: `BuilderTransformerConfig` and its parts, docs.qualcomm.com 80-87189-2
(`genai_builder_configuration`).
"""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from buildlib.validation import NoEffect

OptionValue = str | int | float | bool | None | tuple[str | int | float | bool | None, ...]

PositiveInt = Annotated[int, Field(ge=1)]


class Options(BaseModel):
    """A section of options."""

    model_config = ConfigDict(extra="forbid", frozen=True)


OneOrMore = Annotated[
    tuple[PositiveInt, ...], BeforeValidator(lambda given: [given] if type(given) is int else given)
]
"""Numbers, of which one may stand without brackets."""


DEFAULT_PREFILL, DEFAULT_CONTEXT = 128, 4096
"""AR of the prefill graph beside that of decode, and CL, where a build names none."""


class ARnContextLengthConfig(Options):
    """Shapes of the graphs: one for each AR (tokens per call) at each context length.

    Attributes:
        skip_ar_cl_conversion: keep the one (AR, CL) that the model has.
    """

    auto_regression_number: OneOrMore = Field(default=(1, DEFAULT_PREFILL), min_length=1)
    context_length: OneOrMore = Field(default=(DEFAULT_CONTEXT,), min_length=1)
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
        m2s_additional_start_points: checked against the ONNX.
    """

    enabled: bool = True
    m2s_additional_start_points: Annotated[
        tuple[_StartPoint, ...],
        NoEffect("every attention is found in the graph; names that it lacks are refused"),
    ] = ()
