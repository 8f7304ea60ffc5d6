"""A builder of a model at the few shapes that a test needs."""

from collections.abc import Sequence
from pathlib import Path

from buildlib.genai import GenAIBuilderFactory, GenAIBuilderHTP

EMULATOR = "SM8750:emulator"


def builder_for(
    model: Path,
    cache: Path,
    ars: Sequence[int] = (1, 32),
    cls: Sequence[int] = (192,),
    splits: int | None = 1,
    *,
    target: str = EMULATOR,
    text: str | None = None,
) -> GenAIBuilderHTP:
    """Return a builder; without `splits` it chooses them itself.

    Args:
        model: a checkpoint or an export.
        cache: of the stages.
        ars: the numbers of tokens in a call.
        cls: the lengths of the context.
        splits: the number of parts.
        target: what the container is for.
        text: to calibrate on, where the model has none.
    """
    builder = GenAIBuilderFactory.create(model, cache_root=cache, calibration_text=text)
    lengths = {"auto_regression_number": ars, "context_length": cls}
    builder.set_options({f"arn_cl_options.{key}": value for key, value in lengths.items()})
    if splits is not None:
        builder.set_options({"split_model.num_splits": splits})
    return builder.set_targets([target])
