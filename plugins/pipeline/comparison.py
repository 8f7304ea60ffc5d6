"""The outputs of a pipeline's stages: beside each other, and their scores on a text.

Stages run on this host over one text: float and quantized models on its CPU, a container for the
emulator on the HTP emulator, all by the same loop.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.graph.interface import require_shape
from buildlib.numerics.comparison import SAME_MODEL, VerificationReport
from buildlib.numerics.evaluation import (
    ModelSide,
    OpenSide,
    compare_sides,
    open_side,
    sample_losses,
)
from buildlib.numerics.host_loop import open_onnx
from buildlib.numerics.transformers import TransformersModel
from harness.errors import ConfigFileError, PipelineError
from harness.results.perplexity import standard_error
from harness.runtimes.base import Window
from harness.runtimes.tokenizer import ContextLimit, cut_windows
from harness.workloads.perplexity import score_text
from harness.workloads.reference import window_samples
from harness.workloads.session import Session
from harness.workloads.verify import collect, float_side, kl_bound
from plugins.pipeline.host_model import HostModel, open_host_model, unable_here
from plugins.pipeline.settings import EvaluatorConfig, MetricConfig
from plugins.pipeline.stage import ModelFolder

_WHERE = {
    "float": "CPU, float",
    "quantized": "CPU, quantized",
    "compiled": "HTP emulator, compiled",
}


def compare_stages(
    outputs: Sequence[tuple[str, Mapping[str, object]]],
    text: str,
    windows: int | None,
    scratch: Path,
    *,
    max_kl: float | None = None,
    judge: Path | None = None,
) -> VerificationReport:
    """Compare the output of each stage with the model in float, but for those that changed nothing.

    Args:
        judge: folder of a checkpoint that transformers runs as the reference, in place of the
            model of the first stage, which is a side then.
    """
    name, first = outputs[0]
    model = float_folder(first)
    config = load_config(model / CONFIG_FILE)
    samples = window_samples(float_windows(model, text, windows), config.begin, name)

    def in_float() -> AbstractContextManager[OpenSide]:
        return open_side(open_onnx(model / MODEL_FILE, config, plain=True), _WHERE["float"])

    reference, sides = ModelSide(name, in_float), []
    if judge is not None:
        reference = float_side(lambda: TransformersModel(judge), "transformers")
        sides.append(ModelSide(name, in_float, SAME_MODEL))
    seen = [first]
    for stage, made in outputs[1:]:
        if made not in seen:
            seen.append(made)
            opened = partial(_open_stage, made, scratch)
            sides.append(ModelSide(stage, opened, kl_bound(max_kl), missing=unable_here(made)))
    return collect(compare_sides(reference, sides, samples, config.vocab_size))


@contextmanager
def _open_stage(outputs: Mapping[str, object], scratch: Path) -> Iterator[OpenSide]:
    with (
        open_host_model(outputs, scratch) as model,
        open_side(nullcontext(model.loop), _WHERE[model.kind]) as side,
    ):
        yield side


def float_windows(model: Path, text: str, most: int | None) -> list[Window]:
    """Return the windows that Genie scores at the AR and CL of a model in float."""
    shape = require_shape(model / MODEL_FILE)
    limit = ContextLimit(shape.cl, shape.ar)
    bos = bool(load_config(model / CONFIG_FILE).begin)
    return cut_windows(text, model / TOKENIZER_FILE, limit, most, bos=bos)


def float_folder(outputs: Mapping[str, object]) -> Path:
    """Return the folder of the float model that the first stage made."""
    folder = next(
        (value.path for value in outputs.values() if isinstance(value, ModelFolder)), None
    )
    if folder is None:
        raise PipelineError("the first stage has made no model to compare with")
    return folder


def score_on_host(model: HostModel, text: str, windows: int | None) -> tuple[float, float | None]:
    """Score a text on the host loop.

    Returns:
        The perplexity, `exp` of the mean negative log-likelihood of its tokens, and its standard
        error, None of one window.
    """
    bos = bool(model.config.begin)
    pieces = cut_windows(text, model.tokenizer, model.limit, windows, bos=bos)
    samples = window_samples(pieces, model.config.begin, str(model.tokenizer))
    losses = [float(sample_losses(model.loop, sample).mean()) for sample in samples]
    # windows have as many tokens
    return math.exp(math.fsum(losses) / len(losses)), standard_error(losses)


def score_on_device(session: Session, text: str, windows: int | None) -> tuple[float, float | None]:
    """Score a text by Genie's accuracy API, as `score_on_host` does."""
    result = score_text(session, text, windows=windows).output
    return result.perplexity, result.error


def with_errors(scores: Mapping[str, tuple[float, float | None]]) -> dict[str, float]:
    """Return scores by display name, each error as `NAME_error` after its value."""
    values: dict[str, float] = {}
    for name, (value, error) in scores.items():
        values[name] = value
        if error is not None and f"{name}_error" not in scores:
            values[f"{name}_error"] = error
    return values


_LENGTH = "evaluator_config.context_length"


def with_windows_of(config: EvaluatorConfig, model: HostModel) -> HostModel:
    """Return a model of this host with the window length of the recipe."""
    length, longest = config.context_length, model.limit.context_length
    if length is None:
        return model
    if not model.limit.prefill_ar < length <= longest:
        reason = f"{length} is not between {model.limit.prefill_ar + 1} and {longest}"
        raise ConfigFileError("recipe", None, _LENGTH, f"{reason}, the context of the graphs")
    return replace(model, limit=replace(model.limit, context_length=length))


def refuse_other_windows(config: EvaluatorConfig, session: Session) -> None:
    """Check that the recipe's windows are those that Genie scores."""
    own = session.container.metadata.graphs.context_length
    if config.context_length not in {None, own}:
        reason = f"on a device windows have the container's {own} tokens; leave it out"
        raise ConfigFileError("recipe", None, _LENGTH, reason)


def read_dataset(metric: MetricConfig, folders: tuple[Path, ...]) -> str:
    """Read the text of a metric from the first folder that has it."""
    key = "evaluator_config.metrics.dataset"
    path = metric.find_text(folders)
    if path is None:
        places = " or ".join(map(str, dict.fromkeys(folders)))
        reason = f"there is no text file {metric.dataset} in {places}; nothing is downloaded"
        raise ConfigFileError("recipe", None, key, reason)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError("recipe", None, key, f"{path} cannot be read: {error}") from error
