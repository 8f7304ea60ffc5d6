"""What is kept with a run that fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from harness.devices.device import Device
from harness.devices.local import LocalTransport
from harness.errors import DeviceLostError, HarnessError, RunnerError, WrongUseError
from harness.results.records import WorkloadRecord
from harness.results.store import ResultsStore
from harness.workloads.base import Recording
from harness.workloads.session import Session
from tests.harness.results.places import make_run

RUNNER = RunnerError("local", "genie-t2t-run", "ended with status 1", 1, "[ERROR] no file")


def session() -> Session:
    run = make_run()
    runtime = SimpleNamespace(
        versions=dict, sha256_of=lambda _file: None, read_log=lambda: "[ERROR] no file\n"
    )
    count = SimpleNamespace(highest=1)
    records = (run.container, run.device, run.provenance)
    made = SimpleNamespace(
        runtime=runtime,
        device=Device(LocalTransport()),
        count=count,
        records=lambda: records,
        settings={},
    )
    return cast("Session", made)


def kept(path: Path, failure: HarnessError | None) -> dict[str, bytes]:
    """The files of a run that ends so."""
    with ResultsStore.open(path / "results.db") as store:
        recording = Recording(lambda: store)
        try:
            with recording.start(session(), "generate", WorkloadRecord(runner="genie-t2t-run")):
                if failure is not None:
                    raise failure
        except HarnessError as error:
            assert error is failure  # noqa: PT017
        (run,) = store.list_runs()
        return {one.name: store.read_artifact(one) for one in store.artifacts(run.id)}


def test_a_failed_run_keeps_the_logs_of_runner_and_device(tmp_path: Path) -> None:
    found = kept(tmp_path, RUNNER)
    assert found["run.log"] == b"[ERROR] no file\n"
    assert found["dmesg.txt"]
    assert "logcat.txt" not in found  # this machine is no Android


@pytest.mark.parametrize(
    ("failure", "names"),
    [
        (None, {"run.log"}),
        (WrongUseError("the prompt is too long"), {"run.log"}),
        (DeviceLostError("local", "a push", "it is gone"), set()),
    ],
)
def test_only_a_failure_that_a_device_may_explain_keeps_its_log(
    tmp_path: Path, failure: HarnessError | None, names: set[str]
) -> None:
    assert kept(tmp_path, failure).keys() == names
