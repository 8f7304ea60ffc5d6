"""Metrics of `evaluate()`, after any stage, on this host or on a device.

All cut a text into the windows that Genie scores on a device, so that a model can be compared with
itself from stage to stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from harness.errors import ConfigFileError
from harness.pipeline.host_model import HostModel
from harness.pipeline.settings import EvaluatorConfig, MetricConfig, MetricName
from harness.results.perplexity import standard_error
from harness.workloads.session import Session


@dataclass(frozen=True)
class Score:
    """Value of a metric.

    Attributes:
        error: its standard error; None if one window was scored.
    """

    value: float
    error: float | None = None


class Evaluator(Protocol):
    """One metric."""

    def on_host(self, model: HostModel, metric: MetricConfig, text: str) -> Score:
        """Score a model that runs on this host."""
        ...

    def on_device(self, session: Session, metric: MetricConfig, text: str) -> Score:
        """Score a container on a leased device, by Genie."""
        ...


@dataclass(frozen=True)
class PerplexityEvaluator:
    """The perplexity of a text: `exp` of the mean negative log-likelihood of its tokens."""

    def on_host(self, model: HostModel, metric: MetricConfig, text: str) -> Score:
        """Score on the host loop."""
        import math

        from buildlib.numerics.host_loop import window_losses
        from harness.runtimes.windows import cut_windows

        windows = cut_windows(text, model.tokenizer, model.limit, metric.windows)
        losses = [
            float(window_losses(model.loop, model.bos, window.scored).mean()) for window in windows
        ]
        perplexity = math.exp(math.fsum(losses) / len(losses))  # windows have as many tokens
        return Score(perplexity, standard_error(losses))

    def on_device(self, session: Session, metric: MetricConfig, text: str) -> Score:
        """Score by Genie's accuracy API."""
        from harness.workloads.perplexity import score_text

        result = score_text(session, text, windows=metric.windows).output
        return Score(result.perplexity, result.error)


EVALUATORS: Mapping[MetricName, Evaluator] = {"perplexity": PerplexityEvaluator()}
"""Evaluators by the name of their metric in recipes."""


def by_name(scores: Mapping[str, Score]) -> dict[str, float]:
    """Return scores by display name, each error as `NAME_error` after its value."""
    found: dict[str, float] = {}
    for name, score in scores.items():
        found[name] = score.value
        if score.error is not None and f"{name}_error" not in scores:
            found[f"{name}_error"] = score.error
    return found


_LENGTH = "evaluator_config.context_length"


def with_windows_of(wanted: EvaluatorConfig, model: HostModel) -> HostModel:
    """Return a model of this host with the window length of the recipe.

    Raises:
        ConfigFileError: its graphs have a shorter context.
    """
    length, longest = wanted.context_length, model.limit.context_length
    if length is None:
        return model
    if not model.limit.prefill_ar < length <= longest:
        reason = f"{length} is not between {model.limit.prefill_ar + 1} and {longest}"
        raise ConfigFileError("recipe", None, _LENGTH, f"{reason}, the context of the graphs")
    return replace(model, limit=replace(model.limit, context_length=length))


def refuse_other_windows(wanted: EvaluatorConfig, session: Session) -> None:
    """Check that the recipe's windows are those that Genie scores.

    Raises:
        ConfigFileError: Genie scores windows of the container's context length alone.
    """
    own = session.container.metadata.graphs.context_length
    if wanted.context_length not in {None, own}:
        reason = f"on a device windows have the container's {own} tokens; leave it out"
        raise ConfigFileError("recipe", None, _LENGTH, reason)


def read_dataset(metric: MetricConfig, folders: tuple[Path, ...]) -> str:
    """Read the text of a metric from the first folder that has it.

    Raises:
        ConfigFileError: none has, or it is not a readable text.
    """
    key = "evaluator_config.metrics.dataset"
    path, _ = metric.find_text(folders)
    if path is None:
        places = " or ".join(map(str, dict.fromkeys(folders)))
        reason = f"there is no text file {metric.dataset} in {places}; nothing is downloaded"
        raise ConfigFileError("recipe", None, key, reason)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError("recipe", None, key, f"{path} cannot be read: {error}") from error
