"""What the outputs of a benchmark are checked against, as its options ask."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.results.store import ResultsStore
from harness.workloads.bench_prompt import passage
from harness.workloads.output_check import (
    Expectation,
    KnownQuality,
    ReferenceTokens,
    bounded_quality,
    stored_quality,
)
from harness.workloads.perplexity import run_perplexity
from harness.workloads.target import Target

_CHARACTERS_A_TOKEN = 2
"""Fewer than any tokenizer takes of English text, so that a text is never too short."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a right output is.

    Attributes:
        token_ids: what is to be generated, as long as the query is; None: not known.
        source: where they come from, for people.
        max_perplexity: the highest perplexity of a container whose output counts.
    """

    token_ids: Sequence[int] | None = None
    source: str = ""
    max_perplexity: float | None = None


def expecting(
    wanted: Wanted, new_tokens: int, store: ResultsStore
) -> Callable[[Target], tuple[Expectation, ...]]:
    """What to check a container's output on a device against.

    A stored perplexity counts without being asked for. Where a bound is given and none is stored,
    the device scores one window of the benchmark's passage, which is stored like any perplexity.
    """

    def expectations(target: Target) -> tuple[Expectation, ...]:
        found: list[Expectation] = []
        if wanted.token_ids is not None:
            ids = wanted.token_ids[:new_tokens]
            found.append(ReferenceTokens.of(ids, target.tokenizer, wanted.source))
        quality = _quality(target, wanted.max_perplexity, store)
        return (*found, quality) if quality is not None else tuple(found)

    return expectations


def _quality(
    target: Target, max_perplexity: float | None, store: ResultsStore
) -> KnownQuality | None:
    container, device = target.container_info, target.device_info
    known = stored_quality(store, container, device, max_perplexity=max_perplexity)
    if known is not None or max_perplexity is None:
        return known
    needed = target.container.metadata.graphs.context_length * 2 * _CHARACTERS_A_TOKEN * 4
    text = passage() * (needed // len(passage()) + 1)
    result = run_perplexity(target.runtime, text, target.records(), store, max_windows=1)
    return bounded_quality(result.perplexity, max_perplexity)
