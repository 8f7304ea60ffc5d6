"""A `.mllm` file compiled in mllm's contract, against the same file in Genie's."""

from dataclasses import replace
from pathlib import Path

import pytest

from buildlib.container.writer import htp_config
from buildlib.errors import BuildError, InputFileError
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from plugins.mllm.context import MllmFiles, plan_context
from tests.buildlib.conftest import MakeCheckpoint
from tests.plugins.mllm.mllm_files import write_files

AR, CL = 20, 100


def _with_aot(files: MllmFiles, **changes: object) -> MllmFiles:
    return replace(files, aot=files.aot.model_copy(update=changes))


def test_the_target_machine_decides_the_configuration_and_what_no_graph_can_be_is_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    files = write_files(make_checkpoint, tmp_path / "m", cl=CL)
    for name, written in {
        "HtpBurst": "burst",
        "HtpPowerSaver": "power_saver",
        "HtpSustainedHighPerformance": "sustained_high_performance",
    }.items():
        slow = files.aot.target_machine.model_copy(update={"htp_try_best_performance": name})
        config = _with_aot(files, target_machine=slow).compile_config(files.target())
        devices = htp_config(config).devices
        assert devices is not None
        assert [core.perf_profile for core in devices[0].cores or ()] == [written]
    for key in ("graph_on_qnn", "op_on_qnn"):
        other = _with_aot(files, **{key: ("model.layers.0",)})
        with pytest.raises(InputFileError, match=f"/{key} is .*model.layers.0"):
            plan_context(other, "m", AR, files.target(), tmp_path / "cache", OrtQnnToolchain())
    assert not (tmp_path / "cache").exists()


def test_what_does_not_fit_is_told_before_anything_runs(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    files = write_files(make_checkpoint, tmp_path / "m", cl=CL)
    target, toolchain = files.target(), OrtQnnToolchain()
    with pytest.raises(BuildError, match="AR must divide CL"):
        plan_context(files, "m", 24, target, tmp_path / "cache", toolchain)
    files.parameters.write_bytes(files.parameters.read_bytes()[:-1])
    with pytest.raises(InputFileError, match="line"):
        plan_context(files, "m", AR, target, tmp_path / "cache", toolchain)
    assert not (tmp_path / "cache").exists()
