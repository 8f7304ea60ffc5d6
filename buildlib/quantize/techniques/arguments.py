"""Arguments of techniques: `technique_kwargs` of recipes, options and Python.

Names are the vendor's where its documents have them (`seqmse.num_candidates`, `num_batches`,
`lpbq.block_size`), and otherwise those of the papers.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from buildlib.config_model import Count


class Arguments(BaseModel):
    """Arguments of one technique."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class SpinQuantArguments(Arguments):
    """Arguments of `spinquant`.

    Attributes:
        seed: of the random rotations.
    """

    seed: Annotated[int, Field(ge=0)] = 0


class TextArguments(Arguments):
    """Arguments of a technique that runs text.

    Attributes:
        num_batches: of up to 512 tokens of text each, that it sees in whole windows; `None` follows
            `buildlib.quantize.optimization.calibration_tokens`.
    """

    num_batches: Count | None = None


class SeqMseArguments(TextArguments):
    """Arguments of `seqmse`.

    Attributes:
        num_candidates: steps to try, from the one that covers the largest weight down to 0.4 of it.
    """

    num_candidates: Annotated[int, Field(ge=1, le=1000)] = 25


class GptqArguments(TextArguments):
    """Arguments of `gptq`.

    Attributes:
        damping: addition to the diagonal of the Hessian, as a part of its mean (`percdamp`); `None`
            is 0.01, or more where the text has few tokens for the inputs of a layer.
        block_size: inputs rounded one by one, and then corrected by as many; decides time alone.
        act_order: take inputs by falling activations rather than in their order.
    """

    damping: Annotated[float, Field(gt=0, le=1)] | None = None
    block_size: Count = 64
    act_order: bool = True


class GptaqArguments(GptqArguments):
    """Arguments of `gptaq`.

    Attributes:
        float_text: tokens for each input of the widest layer from which on it looks at the float
            model; with fewer it rounds as GPTQ does.
    """

    float_text: Annotated[float, Field(ge=0)] = 2.0


class AdaScaleArguments(TextArguments):
    """Arguments of `adascale`.

    Attributes:
        num_iterations: steps for each decoder layer, of one window of text each.
        learning_rate: of Adam at the first step; it falls to zero.
        seed: of the order of windows.
    """

    num_iterations: Count = 512
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 0.002
    seed: Annotated[int, Field(ge=0)] = 0


class LpbqArguments(Arguments):
    """Arguments of `lpbq`.

    Attributes:
        block_size: another name of the option `lpbq_block_size`.
    """

    block_size: Count | None = None


class TechniqueArguments(BaseModel):
    """Arguments of all techniques by their names; `model_fields_set` are those that were given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spinquant: SpinQuantArguments = SpinQuantArguments()
    seqmse: SeqMseArguments = SeqMseArguments()
    gptq: GptqArguments = GptqArguments()
    gptaq: GptaqArguments = GptaqArguments()
    adascale: AdaScaleArguments = AdaScaleArguments()
    lpbq: LpbqArguments = LpbqArguments()

    def num_batches(self, name: str) -> int | None:
        """Return the windows of text that a technique was told to see."""
        arguments = getattr(self, name)
        return arguments.num_batches if isinstance(arguments, TextArguments) else None
