"""Options of quantization, in the vendor's vocabulary, and recipes that set them by a name."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, LiteralString, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from buildlib.entry_points import PREFIX, entry_names
from buildlib.errors import InvalidOptionError
from buildlib.quantize.techniques.arguments import TechniqueArguments

TechniqueName = Literal["spinquant", "seqmse", "gptq", "gptaq", "adascale"]
StepName = Literal["spreading", "splitting", "scaling"] | TechniqueName
"""What changes a float model: a technique, or what is exact and gives bits room."""
DOOR = "techniques"
"""Entry points of techniques: each takes its name and its arguments, and is a `WeightTechnique`."""
BUILT_IN = ("spinquant", "gptq", "gptaq")
RangeName = Literal["minmax", "percentile", "mse"]

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "w8a16": {"param_bitwidth": 8},
    "w8a8": {"param_bitwidth": 8, "act_bitwidth": 8},
    "w4a16": {"param_bitwidth": 4, "techniques": ("gptaq",)},
    "w4a16-mixed": {
        "param_bitwidth": 4,
        "mixed_precision": ("*.k_proj.weight=8", "*.v_proj.weight=8", "*.down_proj.weight=8"),
        "techniques": ("gptaq",),
    },
    "w4a16-channel": {"param_bitwidth": 4, "lpbq_block_size": None, "techniques": ("gptaq",)},
    "w4a16-rtn": {"param_bitwidth": 4, "techniques": ()},
    "w4a16-spinquant": {"param_bitwidth": 4, "techniques": ("spinquant", "gptaq")},
    "LPBQ_SeqMSE": {"param_bitwidth": 4, "techniques": ("seqmse",)},
    "SpinQuant_AdaScale": {"param_bitwidth": 4, "techniques": ("spinquant", "adascale")},
}
"""Options by the name of a recipe; the last two names are the vendor's."""

_OTHER_NAMES = {
    "spinquant": "w4a16-spinquant",
    "gptaq": "w4a16",
    "w4a16_lpbq": "w4a16",
    "lpbq": "w4a16-rtn",
}


def _as_in_table(name: str) -> str:
    """Return the name of a recipe as its table has it, for any case and `_` for `-`."""
    # The vendor's documents have `lpbq_seqmse` beside `LPBQ_SeqMSE` and its class
    # `LPBQ_SeqMSE_Recipe`, and `spinquant`, without a technique that rounds the weights.
    plain = {_plain(recipe): recipe for recipe in RECIPES} | _OTHER_NAMES
    return plain.get(_plain(name).removesuffix("_recipe"), name)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


class QuantizationOptions(BaseModel):
    """Bits of values that the encodings leave open, which is all of a checkpoint.

    Names without a counterpart in the vendor's builder are ours: all but `act_bitwidth`,
    `bias_bitwidth` and `param_bitwidth`.

    Attributes:
        recipe: name of a recipe that sets all options that are not set themselves; in any case, and
            with `_` or `-`.
        act_bitwidth: bits of activations, tables and norms, but for keys and values.
        bias_bitwidth: bits of biases.
        param_bitwidth: bits of weights of linear layers; the output projection has 8.
        kv_bitwidth: bits of keys and values, in the cache and on their way into it: Genie takes one
            width for all; `None` leaves the choice to calibration.
        lpbq_block_size: 4-bit weights get a scale for each block of this many inputs (LPBQ); `None`
            gives a scale for each output channel, as do inputs that are no whole blocks, unless
            the size was set.
        mixed_precision: `PATTERN=BITS` for weights by name, such as `*.down_proj.weight=8`; the
            last that matches decides, of the output projection too.
        activation_precision: `PATTERN=BITS` for activations by name, such as `layer_*_output=16`;
            the last that matches decides.
        techniques: applied to the weights in this order; `None` is GPTAQ where weights have 4 bits,
            and none where all have 8.
        technique_kwargs: arguments of the techniques.
        activation_ranges: estimator of the ranges of activations.
        calibration_tokens: of the text that ranges are observed on; `None` is 2048.
        scaling: rescale keys and values exactly, so that 8 bits hold them; `None` does so unless an
            ONNX export has encodings of its own, which lose those of what is rescaled.
        spreading: with it, spread massive channels of the residual stream over others, if nothing
            is built beside the model: by rotations, or where the gains of norms make them by
            copies, which make it wider by a twentieth.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: Annotated[str, Field(min_length=1), AfterValidator(_as_in_table)] | None = None
    act_bitwidth: Literal[8, 16] = 16
    bias_bitwidth: Literal[8, 32] = 32
    param_bitwidth: Literal[4, 8] = 8
    kv_bitwidth: Literal[8, 16] | None = None
    lpbq_block_size: Annotated[int, Field(ge=1)] | None = 32
    mixed_precision: tuple[str, ...] = ()
    activation_precision: tuple[str, ...] = ()
    techniques: tuple[TechniqueName, ...] | None = None
    technique_kwargs: TechniqueArguments = TechniqueArguments()
    activation_ranges: RangeName = "minmax"
    calibration_tokens: Annotated[int, Field(ge=1)] | None = None
    scaling: bool | None = None
    spreading: bool = True

    @model_validator(mode="after")
    def _apply_recipe(self) -> Self:
        if self.recipe is None:
            return self
        if self.recipe not in RECIPES:
            reason = f"there is no recipe {self.recipe!r}; there are {', '.join(RECIPES)}"
            raise _unknown(reason)
        for key, value in RECIPES[self.recipe].items():
            if key not in self.model_fields_set:  # which stays what the user has set
                self.__dict__[key] = value
        return self

    @model_validator(mode="after")
    def _take_block_size(self) -> Self:
        size = self.technique_kwargs.lpbq.block_size
        if size is not None:
            if "lpbq_block_size" in self.model_fields_set and self.lpbq_block_size != size:
                reason = f"technique_kwargs.lpbq.block_size is {size}"
                raise _unknown(f"lpbq_block_size is {self.lpbq_block_size}, and {reason}")
            self.__dict__["lpbq_block_size"] = size
        return self

    @property
    def blocks_where_they_fit(self) -> bool:
        """The size of blocks is that of the default, for weights alone that it fits."""
        arguments = self.technique_kwargs.lpbq.block_size
        return arguments is None and "lpbq_block_size" not in self.model_fields_set

    @property
    def weight_techniques(self) -> tuple[TechniqueName, ...]:
        """The techniques to apply, with the default of 4 bits."""
        if self.techniques is not None:
            return self.techniques
        fewer = any(text.endswith("=4") for text in self.mixed_precision)
        return ("gptaq",) if self.param_bitwidth == 4 or fewer else ()

    def steps(self, *, encoded: bool) -> tuple[StepName, ...]:
        """Return what changes the float model, in order.

        Args:
            encoded: whether the model comes with encodings.
        """
        techniques: tuple[StepName, ...] = self.weight_techniques
        if not (not encoded if self.scaling is None else self.scaling):
            return techniques
        if techniques[:1] == ("spinquant",):  # which mixes channels
            return ("spinquant", "scaling", *techniques[1:])
        if not self.spreading:
            return ("scaling", *techniques)
        # Rounded to the nearest, weights of 4 bits lose more by a rotation than it saves.
        is_rounded = self.param_bitwidth == 4 and {"gptq", "gptaq"}.isdisjoint(techniques)
        return ("splitting" if is_rounded else "spreading", "scaling", *techniques)


def check_arguments(options: QuantizationOptions) -> None:
    """Refuse techniques that are not here, and arguments of those that are not applied."""
    applied = options.weight_techniques
    if missing := ", ".join({*applied} - {*BUILT_IN, *entry_names(DOOR)}):
        reason = f"no installed package has {missing} (entry points `{PREFIX}{DOOR}`)"
        raise InvalidOptionError("quantization.techniques", reason, ())
    for name in options.technique_kwargs.model_fields_set - {"lpbq", *applied}:
        reason = f"{name} is not applied; the techniques are {', '.join(applied) or 'none'}"
        raise InvalidOptionError(f"quantization.technique_kwargs.{name}", reason, ())


def _unknown(reason: str) -> PydanticCustomError:
    text: LiteralString = "{reason}"  # noqa: RUF027  (a template of pydantic's)
    return PydanticCustomError("recipe", text, {"reason": reason})
