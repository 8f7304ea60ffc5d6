"""`qnnfarm explain RUN` after runs that failed as on phones whose DSP refuses them."""

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.app import build_app
from harness.codes import find_codes
from harness.errors import BAD
from plugins.virtual_android import manager
from plugins.virtual_android.faults import DSP_MESSAGES, DspCause, parse_fault
from tests.conftest import MakeDevice
from tests.harness.cli.conftest import Run

CAUSES: dict[DspCause, tuple[str, str]] = {
    "path": ("FastRPC 0x80000406", "The skeleton is not in ADSP_LIBRARY_PATH."),
    "skeleton": ("FastRPC 0x80000442", "it found the phone's own, older skeleton."),
    "architecture": ("QNN 1009", "The binaries were compiled for another SoC"),
    "runtime": ("QNN 5000", "The runtime is older than the compiler of the binary."),
}


def test_the_cause_is_in_what_users_of_phones_saw() -> None:
    for cause, (label, text) in CAUSES.items():
        first = find_codes(DSP_MESSAGES[cause])[0].code
        assert first.label == label
        assert any(text in one.cause for one in first.causes)


@pytest.mark.parametrize(
    ("runtime", "cause"),
    [("graph", "runtime"), pytest.param("genie", "path", marks=pytest.mark.variant)],
)
def test_the_cause_of_a_run_that_a_dsp_refused_is_named(
    qnnfarm: Run,
    make_virtual_device: MakeDevice,
    small_bundle: Path,
    tmp_path: Path,
    runtime: str,
    cause: DspCause,
) -> None:
    virtual, device = make_virtual_device()
    label, text = CAUSES[cause]
    manager.control(virtual.name).inject(parse_fault(f"dsp:cause={cause}"))
    db = tmp_path / "results.db"
    asked = ("--device", device.serial, "--runtime", runtime, "-p", "8", "-n", "2")
    done = qnnfarm("bench", small_bundle, *asked, "--db", db)
    assert done.returncode == BAD, done.stderr
    assert "killed by signal 6" in done.stderr
    assert label in done.stderr
    with sqlite3.connect(db) as store:
        [(run,)] = store.execute("select id from runs")
    shown = CliRunner().invoke(build_app(), ["explain", run, "--db", str(db), "--json"])
    first = json.loads(shown.stdout)[0]
    assert first["label"] == label
    assert any(text in one["cause"] for one in first["causes"])
