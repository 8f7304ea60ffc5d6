"""Whether a workload fits into a container's context, which can be known before it is run."""

from buildlib.container.manifest import GraphsRecord
from harness.errors import PromptTooLongError
from harness.plans.plan_file import BenchWork, GenerateWork, Work

_LEAST_PROMPT = 2
"""Bos and a token."""


def too_long(graphs: GraphsRecord, work: Work) -> tuple[str, PromptTooLongError] | None:
    """The key of a workload that asks for too much, and the error of the runtime that would come.

    A prompt's length in tokens is known where the plan gives it; else the answer must leave room.
    """
    if isinstance(work, BenchWork):
        key, prompt, new = "prompt_tokens", work.prompt_tokens, work.new_tokens
    elif isinstance(work, GenerateWork):
        key, prompt, new = "max_tokens", _LEAST_PROMPT, work.max_tokens
    else:
        return None
    context = graphs.context_length
    most_prompt = context - max(graphs.auto_regression_numbers) + 1
    if prompt <= most_prompt and prompt + new <= context:
        return None
    return key, PromptTooLongError(prompt, new, most_prompt, context)
