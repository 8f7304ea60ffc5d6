"""Ranking of a pipeline's tensors by the cost of their quantization, beside the model in float.

The model in float is the output of the first stage, the quantized one that of the last stage before
the builder. A weight that a technique has changed counts as changed.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from buildlib.builder.model_folder import write_alike
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE, MODEL_FILE
from buildlib.encodings.files import load_encodings
from buildlib.quantize.loss import UNIT_KINDS, UnitKind
from harness.console import Row, answers, print_remark, print_rows
from harness.errors import PipelineError
from harness.results.metrics import METRICS
from harness.words import pluralize
from plugins.pipeline.comparison import float_folder, float_windows
from plugins.pipeline.llm import LLMPipeline
from plugins.pipeline.ranking import (
    Granularity,
    RankedModel,
    Sensitivity,
    UnitCost,
    changed_weights,
    rank_tensors,
)
from plugins.pipeline.stage import ModelFolder

BUILDER = "genai_builder"
_HEADINGS = ("tensor", "KL alone", "SQNR", "layer's SQNR", "bits", "more by", "KL without")


@dataclass(frozen=True)
class Ranking:
    """Costs of a pipeline's tensors, the greatest first, over some windows of text."""

    sensitivity: Sensitivity
    windows: int

    def print(self, top: int | None = 20) -> None:
        """Print the ranking, and what the whole quantization costs."""
        costs, whole = self.sensitivity.costs, self.sensitivity.whole.metrics
        both = any(cost.rest is not None for cost in costs)
        headings = _HEADINGS if both else _HEADINGS[:-1]
        rows = [Row(_cells(cost)[: len(headings)]) for cost in costs[:top]]
        print_rows(headings, rows, right=set(headings[1:]) - {"more by"})
        if len(rows) < len(costs):
            answers().print(f"and {len(costs) - len(rows)} that cost less")
        keys = ("perplexity_float", "perplexity", "kl_divergence", "top1_agreement")
        before, after, kl, top1 = (METRICS[key].show(whole[key]) for key in keys)
        answers().print(f"all together: KL {kl}, top-1 {top1}, perplexity {before} to {after}")
        tokens = pluralize(self.sensitivity.whole.steps, "token")
        print_remark(f"{tokens} in {pluralize(self.windows, 'window')}")

    def as_document(self) -> dict[str, object]:
        """Return the result as JSON can hold it; SQNRs that are infinite are null."""
        return {
            "windows": self.windows,
            "positions": self.sensitivity.whole.steps,
            "granularity": self.sensitivity.granularity,
            "whole": self.sensitivity.whole.metrics,
            "costs": [_document(cost) for cost in self.sensitivity.costs],
        }


def last_before_builder(pipe: LLMPipeline) -> str:
    """Return the name of the last stage before the builder, which makes the model to rank."""
    names = list(pipe.config.stages)
    last = names.index(BUILDER) - 1 if BUILDER in names else len(names) - 1
    if last < 1:
        raise PipelineError("the recipe has no stage that quantizes the model")
    return names[last]


def rank_pipeline(
    pipe: LLMPipeline,
    text: str | None = None,
    windows: int | None = None,
    *,
    granularity: Granularity | None = None,
    kinds: tuple[UnitKind, ...] = UNIT_KINDS,
    both_ways: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Ranking:
    """Rank the costs of a pipeline's quantization.

    Args:
        pipe: its stages up to the builder are run if they have not been.
        text: to measure on; by default the data set of the recipe's first metric.
        windows: pieces of it; by default as many as that metric has.
        granularity, kinds, both_ways, progress: as `rank_tensors` takes them.

    Raises:
        PipelineError: no stage quantizes the model.
        BuildError: a model cannot run.
    """
    last = last_before_builder(pipe)
    if last not in pipe.completed:
        pipe.construct(until=last)
    quantized = pipe.outputs(last).get("model")
    if not isinstance(quantized, ModelFolder) or not quantized.quantized:
        raise PipelineError("no stage has quantized the model: name `quantization` in stages")
    whole, folder = float_folder(pipe.outputs(pipe.completed[0])), quantized.path
    cut = float_windows(whole, *pipe.text_to_compare(text, windows))
    parent = pipe.cache_root / pipe.model_name
    with ExitStack() as stack:
        # Variants are put beside the model: not into an entry that other builds check.
        scratch = Path(stack.enter_context(TemporaryDirectory(dir=parent, prefix=".variants.")))
        # Values between rescaled constants are others, but not what the model computes.
        model = write_alike(whole / MODEL_FILE, folder, scratch)
        weights = changed_weights(model, folder / MODEL_FILE)
        config, scored = load_config(whole / CONFIG_FILE), [window.tokens for window in cut]
        sensitivity = rank_tensors(
            stack.enter_context(RankedModel(model, config, scored, weights)),
            load_encodings(folder / ENCODINGS_FILE).by_name(),
            granularity=granularity,
            kinds=kinds,
            both_ways=both_ways,
            progress=progress,
        )
    return Ranking(sensitivity, len(scored))


def _cells(cost: UnitCost) -> list[str]:
    rest = "-" if cost.rest is None else f"{cost.rest.kl:.5f}"
    sqnr, output = (_decibels(value) for value in (cost.sqnr_db, cost.output_sqnr_db))
    unit = cost.unit
    return [
        unit.name,
        f"{cost.alone.kl:.5f}",
        sqnr,
        output,
        str(cost.bits),
        cost.remedy or "-",
        rest,
    ]


def _decibels(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.1f} dB"


def _document(cost: UnitCost) -> dict[str, object]:
    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "name": cost.unit.name,
        "kind": cost.unit.kind,
        "tensors": sorted(cost.unit.encodings),
        "bits": cost.bits,
        "remedy": cost.remedy,
        "sqnr_db": finite(cost.sqnr_db),
        "output_sqnr_db": finite(cost.output_sqnr_db),
        "alone": cost.alone.metrics,
        "without": None if cost.rest is None else cost.rest.metrics,
    }
