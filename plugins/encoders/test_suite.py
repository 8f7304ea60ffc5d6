"""A text encoder on the device against the model that it was built from."""

from pathlib import Path

import pytest

from harness.pytest_plugin.measurements import MeasurementRecorder
from harness.pytest_plugin.recordings import TestRecordings
from harness.workloads.session import Session
from plugins.encoders import tiny_encoder
from plugins.encoders.workload import Embed
from suites.conftest import fitting_container, suite_parameters
from suites.parameters import SuiteParameters

NEEDS_ENCODER = True
_TEXTS = 50


@pytest.fixture
def checkpoint(session: Session, suite_parameters: SuiteParameters, tmp_path: Path) -> Path:
    """The model that the container was built from: the user's, or the reference encoder."""
    if suite_parameters.checkpoint is not None:
        return suite_parameters.checkpoint
    if session.container.metadata.model.name != tiny_encoder.NAME:
        pytest.skip("nothing to compare it with: give --suite-param checkpoint=DIR")
    return tiny_encoder.write(tmp_path / tiny_encoder.NAME)


def test_embeddings(
    session: Session,
    recording: TestRecordings,
    record_measurement: MeasurementRecorder,
    suite_parameters: SuiteParameters,
    checkpoint: Path,
) -> None:
    """The cosine with the model in float is high for each of 50 texts."""
    if suite_parameters.text is not None:
        lines = suite_parameters.text.read_text(encoding="utf-8").splitlines()
        texts = [line for line in lines if line.strip()][:_TEXTS]
    else:
        texts = list(tiny_encoder.heldout_sentences(_TEXTS))
    workload = Embed.of(texts=tuple(texts), reference=str(checkpoint))
    output = workload.run(session, recording()).output
    least = min(output.cosines)
    record_measurement("cosine_float", least, test=f"least of {len(texts)} texts")
    text = texts[output.cosines.index(least)]
    assert least >= suite_parameters.min_cosine, f"the cosine with float is {least:.4f} of {text!r}"
