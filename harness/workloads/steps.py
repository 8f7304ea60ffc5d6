"""The logits of each decode step, beside those of the model in float: `perplexity --per-step`.

A window's first half is the prompt. Its second half is decoded token by token, whatever the logits
say, so that the device goes the way of the text and both models see the same context. Genie hands
the logits to a custom sampler of ours.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from buildlib.numerics.divergence import Divergence, Logits, measure_divergence
from harness.errors import RuntimeOutputError
from harness.results.records import ContainerInfo, OutputCheck, PerplexityDefinition, WorkloadRecord
from harness.runtimes.base import DecodesSteps, StepWindow, Window
from harness.workloads.base import (
    UNRECORDED,
    Recording,
    WorkloadResult,
    require_passed,
    summarize,
)
from harness.workloads.reference import engine_versions, open_float
from harness.workloads.session import Session

if TYPE_CHECKING:
    from buildlib.checkpoint.config import DecoderConfig
    from buildlib.numerics.host_loop import TokenModel
    from buildlib.numerics.transformers import ReferenceEngine

KL_DIVERGENCE, TOP1_AGREEMENT = "kl_divergence", "top1_agreement"
DEFAULT_STEP_WINDOWS = 2
"""Windows whose steps are compared by default: the emulator decodes a few tokens a second."""


@dataclass(frozen=True)
class StepResult:
    """Distance of the device from the model in float.

    Attributes:
        windows: number of windows.
    """

    divergence: Divergence
    windows: int


def cut_steps(windows: Sequence[Window]) -> list[StepWindow]:
    """Halve windows: the first half is the prompt, the second is decoded."""
    halves = [len(window.scored) // 2 for window in windows]
    return [
        StepWindow((*window.context, *window.scored[:half]), window.scored[half:])
        for window, half in zip(windows, halves, strict=True)
    ]


def compare_steps(
    session: Session,
    text: str,
    steps: Sequence[StepWindow],
    expected: Sequence[Logits],
    recording: Recording = UNRECORDED,
    *,
    max_kl: float | None = None,
    reference_with: "ReferenceEngine" = "onnx",
) -> WorkloadResult[StepResult]:
    """Compare the decode steps of the session's device with those of the model in float."""
    runtime = session.require(DecodesSteps)
    definition = PerplexityDefinition(
        positions="decode_steps",
        windows=len(steps),
        tokens=sum(len(window.following) for window in steps),
    )
    record = WorkloadRecord(
        runner=session.runtime.runner(DecodesSteps),
        dataset_sha256=hashlib.sha256(text.encode()).hexdigest(),
        perplexity=definition,
    )
    with recording.start_if_stored(session, "perplexity", record) as recorder:
        answer = runtime.decode_steps(steps)
        if recorder is not None:
            recorder.traces.append(answer.trace)
        try:
            following = [each.following for each in steps]
            divergence = measure_divergence(answer.windows, expected, following)
        except ValueError as error:
            raise RuntimeOutputError(session.device.serial, str(error)) from error
        values = divergence.metrics
        if recorder is not None:
            recorder.add_values(values)
            recorder.add_library_versions(engine_versions(reference_with))
        if max_kl is not None:
            check = _check(divergence, max_kl)
            require_passed(check, recorder, session.device.serial)
    result = StepResult(divergence, len(steps))
    return WorkloadResult(result, values, summarize(values), recording.stored_run(recorder))


def _check(divergence: Divergence, max_kl: float) -> OutputCheck:
    summary = (
        f"the KL divergence from float is {divergence.kl:.5f} nats over {divergence.steps} steps"
    )
    if divergence.kl <= max_kl:
        return OutputCheck(outcome="passed", reason=f"{summary}, at most {max_kl:g}")
    return OutputCheck(outcome="failed", reason=f"{summary}, above {max_kl:g}")


def float_steps(
    checkpoint: str | os.PathLike[str],
    info: ContainerInfo,
    windows: Sequence[StepWindow],
    engine: "ReferenceEngine" = "onnx",
    folder: Path | None = None,
) -> list[Logits]:
    """Compute the logits of a checkpoint in float, on this host, at the steps of windows.

    Args:
        checkpoint, folder: as `open_float` has them.
    """
    with open_float(checkpoint, info, engine, folder) as (model, config):
        return model_steps(model, config, windows)


def model_steps(
    model: "TokenModel", config: "DecoderConfig", windows: Sequence[StepWindow]
) -> list[Logits]:
    """Compute the logits of a model, on this host, at the steps of windows."""
    import numpy as np

    from buildlib.numerics.host_loop import feed_window

    steps = []
    for window in windows:
        prompt = [*config.begin, *window.prompt] if window.bos else window.prompt
        tokens = [*prompt, *window.following[:-1]]
        logits = np.concatenate([each for _, each in feed_window(model, tokens)])
        steps.append(logits[len(prompt) - 1 :])
    return steps
