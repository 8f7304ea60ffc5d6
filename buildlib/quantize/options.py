"""Options of quantization, in the vendor's vocabulary."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class QuantizationOptions(BaseModel):
    """Bits of values that the encodings leave open, which is all of a checkpoint.

    Attributes:
        act_bitwidth: bits of activations, tables and norms; keys and values always have 8.
        bias_bitwidth: bits of biases.
        param_bitwidth: bits of weights of linear layers; the output projection always has 8.
        lpbq_block_size: 4-bit weights get a scale for each block of this many inputs (LPBQ); `None`
            gives a scale for each output channel. A name of ours.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    act_bitwidth: Literal[8, 16] = 16
    bias_bitwidth: Literal[8, 32] = 32
    param_bitwidth: Literal[4, 8] = 8
    lpbq_block_size: Annotated[int, Field(ge=1)] | None = None
