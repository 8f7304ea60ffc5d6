"""Tasks: does the model on the device answer questions better than by guessing?"""

from pathlib import Path

import pytest

import suites
from harness.pytest_plugin.recordings import TestRecordings
from harness.workloads.session import Session
from plugins.evaluation.workload import Evaluate
from suites.conftest import fitting_container, suite_parameters
from suites.models import tiny_llama
from suites.parameters import SuiteParameters

_CLOZE = Path(*suites.__path__) / "tasks" / "kjv_cloze.jsonl"


def test_task(
    session: Session, recording: TestRecordings, suite_parameters: SuiteParameters
) -> None:
    """The accuracy is above that of guessing; prompts are only measured."""
    task = suite_parameters.task
    if task is None:
        if session.container.metadata.model.name != tiny_llama.folder().name:
            pytest.skip("no questions for this model: give --suite-param task=FILE")
        task = _CLOZE
    workload = Evaluate.of(task=str(task), limit=suite_parameters.rows)
    workload.check(session.model)
    output = workload.run(session, recording()).output
    rows = [row for row in output.task.rows if hasattr(row, "choices")]
    if not rows:
        return
    chance = sum(1 / len(row.choices) for row in rows) / len(rows)
    accuracy = output.values["accuracy"]
    assert accuracy > chance, f"{accuracy:.3f} of {len(rows)} questions; guessing has {chance:.3f}"
