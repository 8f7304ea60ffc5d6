"""The builder's options in the vendor's vocabulary, and the dotted keys that set them.

Names and defaults: `BuilderTransformerConfig` and its parts, docs.qualcomm.com 80-87189-2
(`genai_builder_configuration`).
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buildlib.errors import InvalidOptionError

PositiveInt = Annotated[int, Field(ge=1)]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ARnContextLengthConfig(_Options):
    """Which graphs to make: one for each AR (tokens per call) at each context length."""

    auto_regression_number: tuple[PositiveInt, ...] = Field(default=(1, 128), min_length=1)
    context_length: tuple[PositiveInt, ...] = Field(default=(4096,), min_length=1, max_length=1)


class SplitModelConfig(_Options):
    """How many parts the model is cut into, at layer boundaries."""

    num_splits: PositiveInt = 1


class ModelTransformerConfig(_Options):
    """What happens to the ONNX before it is converted."""

    arn_cl_options: ARnContextLengthConfig = ARnContextLengthConfig()
    split_model: SplitModelConfig = SplitModelConfig()

    def with_options(self, options: Mapping[str, object]) -> "ModelTransformerConfig":
        """A copy with dotted keys set, such as `split_model.num_splits`.

        Raises:
            InvalidOptionError: a key that does not exist, or a value that it cannot take; names the
                key.
        """
        values: dict[str, Any] = self.model_dump()
        for key, value in options.items():
            section, _, name = key.partition(".")
            if section not in values or name not in values[section]:
                known = tuple(f"{part}.{field}" for part in values for field in values[part])
                raise InvalidOptionError(key, "no such option", known)
            values[section][name] = value
        try:
            return ModelTransformerConfig.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"][:2])
            raise InvalidOptionError(key, first["msg"], ()) from error
