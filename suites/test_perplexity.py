"""Does the container predict text as well as the model that it was built from?"""

import pytest

from harness.pytest_plugin.container_runner import ContainerRunner
from harness.pytest_plugin.measurements import MeasurementRecorder
from harness.results.perplexity import PERPLEXITY, PERPLEXITY_FLOAT, perplexity_faults
from harness.workloads.bench_prompt import bench_text
from harness.workloads.perplexity import float_perplexity
from suites.models import tiny_llama
from suites.parameters import SuiteParameters
from suites.reference import known_checkpoint


def test_perplexity(
    run_container: ContainerRunner,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
) -> None:
    """Genie's own perplexity on the device, beside the bound that the host or the user gives.

    The float model scores exactly the same tokens, so that the two can be compared.
    """
    asked, container = suite_parameters, run_container.container
    checkpoint = asked.checkpoint or known_checkpoint(container)
    if asked.text is not None:
        text = asked.text.read_text(encoding="utf-8")
    else:
        text = tiny_llama.heldout_text() if known_checkpoint(container) else bench_text()
    references = {}
    if checkpoint is not None:
        windows = run_container.runtime.windows(text, asked.windows)
        references[PERPLEXITY_FLOAT] = float_perplexity(checkpoint, container, windows)
    result = run_container.perplexity(text, max_windows=asked.windows, references=references)
    for metric, value in {PERPLEXITY: result.perplexity, **references}.items():
        record_measurement.note(metric, value)
    if asked.max_perplexity is not None:
        assert result.perplexity <= asked.max_perplexity
    faults = perplexity_faults({PERPLEXITY: result.perplexity, **references})
    assert not faults, "; ".join(faults)
    if not references and asked.max_perplexity is None:
        pytest.skip(
            f"perplexity is {result.perplexity:.3f}, and nothing to compare it with: give "
            "--suite-param checkpoint=DIR or max_perplexity=N"
        )
