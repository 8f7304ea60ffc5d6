"""Does the container predict text as well as the model that it was built from?"""

from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from harness.pytest_plugin.container_runner import ContainerRunner
from harness.pytest_plugin.measurements import MeasurementRecorder
from harness.results.perplexity import PERPLEXITY, PERPLEXITY_FLOAT, find_perplexity_faults
from harness.workloads.bench_prompt import bench_text
from harness.workloads.perplexity import float_perplexity
from suites.models import tiny_llama
from suites.parameters import SuiteParameters


def test_perplexity(
    run_container: ContainerRunner,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
) -> None:
    """Genie's own perplexity on the device, beside the bound that the host or the user gives.

    The float model scores exactly the same tokens, so that the two can be compared.
    """
    container = run_container.container
    own_checkpoint = _reference_checkpoint(container)
    checkpoint = suite_parameters.checkpoint or own_checkpoint
    if suite_parameters.text is not None:
        text = suite_parameters.text.read_text(encoding="utf-8")
    else:
        text = tiny_llama.heldout_text() if own_checkpoint else bench_text()
    references = {}
    if checkpoint is not None:
        windows = run_container.runtime.windows(text, suite_parameters.windows)
        references[PERPLEXITY_FLOAT] = float_perplexity(checkpoint, container, windows)
    result = run_container.perplexity(
        text, max_windows=suite_parameters.windows, references=references
    )
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


def _reference_checkpoint(container: GenAIContainer) -> Path | None:
    """The reference model's checkpoint, if the container was built from it."""
    folder = tiny_llama.folder()
    own = container.files["tokenizer.json"].read_bytes()
    same = own == (folder / "tokenizer.json").read_bytes()
    return folder if same and container.metadata.model.name == folder.name else None
