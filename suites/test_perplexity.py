"""Perplexity of a container against the model that it was built from."""

from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from harness.pytest_plugin.measurements import MeasurementRecorder
from harness.pytest_plugin.recordings import TestRecordings
from harness.results.perplexity import (
    PERPLEXITY,
    PERPLEXITY_FLOAT,
    default_tolerance,
    find_perplexity_faults,
)
from harness.workloads.bench_prompt import bench_text
from harness.workloads.perplexity import float_perplexity, score_text
from harness.workloads.session import Session
from harness.workloads.verify import (
    DEFAULT_WINDOWS,
    KL_DIVERGENCE,
    TOP1_AGREEMENT,
    compare_with_float,
)
from suites.models import tiny_llama
from suites.parameters import SuiteParameters

_KL_OF_8_BITS, _KL_OF_4_BITS = 0.02, 0.2
"""Nats; the reference model is 0.001 from float with W8A16 (docs/quality.md has others)."""


def test_perplexity(
    session: Session,
    recording: TestRecordings,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
) -> None:
    """Genie's own perplexity on the device, beside the bound that the host or the user gives.

    The float model scores exactly the same tokens, so that the two can be compared.
    """
    container = session.container
    own_checkpoint = _reference_checkpoint(container)
    checkpoint = suite_parameters.checkpoint or own_checkpoint
    if suite_parameters.text is not None:
        text = suite_parameters.text.read_text(encoding="utf-8")
    else:
        text = tiny_llama.heldout_text() if own_checkpoint else bench_text()
    references = {}
    if checkpoint is not None:
        windows = session.model.windows(text, suite_parameters.windows)
        references[PERPLEXITY_FLOAT] = float_perplexity(checkpoint, session.model.info, windows)
    result = score_text(
        session, text, recording(), windows=suite_parameters.windows, references=references
    ).output
    for metric, value in {PERPLEXITY: result.perplexity, **references}.items():
        record_measurement.note(metric, value)
    bound = suite_parameters.max_perplexity
    if bound is not None:
        if bound.relative and not references:
            pytest.fail(f"max_perplexity={bound} needs --suite-param checkpoint=DIR", pytrace=False)
        values = {PERPLEXITY: result.perplexity, **references}
        check = bound.check(values, f"{len(result.windows)} windows")
        assert check.outcome == "passed", check.reason
        return
    faults = find_perplexity_faults(
        {PERPLEXITY: result.perplexity, **references}, container.precision
    )
    assert not faults, "; ".join(faults)
    if not references:
        pytest.skip(
            f"perplexity is {result.perplexity:.3f}, and nothing to compare it with: give "
            "--suite-param checkpoint=DIR or max_perplexity=N"
        )


def test_decode_steps(
    session: Session,
    recording: TestRecordings,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
) -> None:
    """The distribution of the next token is near that of float, step by step."""
    container = session.container
    own = _reference_checkpoint(container)
    checkpoint = suite_parameters.checkpoint or own
    if checkpoint is None:
        pytest.skip("nothing to compare it with: give --suite-param checkpoint=DIR")
    if suite_parameters.text is not None:
        text = suite_parameters.text.read_text(encoding="utf-8")
    else:
        text = tiny_llama.heldout_text() if own else bench_text()
    most = min(suite_parameters.windows, DEFAULT_WINDOWS)
    divergence = compare_with_float(session, text, checkpoint, recording(), windows=most).output
    record_measurement.note(KL_DIVERGENCE, divergence.kl)
    record_measurement.note(TOP1_AGREEMENT, divergence.top1)
    precise = default_tolerance(container.precision) == default_tolerance("W8A16")
    bound = suite_parameters.max_kl
    bound = bound if bound is not None else _KL_OF_8_BITS if precise else _KL_OF_4_BITS
    assert divergence.kl <= bound, (
        f"the KL divergence from float is {divergence.kl:.4f} nats, above {bound:g}"
    )


def _reference_checkpoint(container: GenAIContainer) -> Path | None:
    """Return the reference model's checkpoint, if the container was built from it."""
    folder = tiny_llama.folder()
    own = container.files["tokenizer.json"].read_bytes()
    same = own == (folder / "tokenizer.json").read_bytes()
    return folder if same and container.metadata.model.name == folder.name else None
