"""A `.mllm` file compiled in mllm's contract, against the same file in Genie's."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from buildlib.builder.parts import GENIE
from buildlib.checkpoint.config import load_config
from buildlib.container.container import GenAIContainer
from buildlib.container.writer import htp_config
from buildlib.errors import BuildError, InputFileError
from buildlib.foreign.importer import import_artifact
from buildlib.graph.rope import rope_tables
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from plugins.mllm.apply_contract import MLLM
from plugins.mllm.context import MllmFiles, plan_context
from plugins.mllm.graph_contract import find_fault
from tests.buildlib.conftest import MakeCheckpoint
from tests.plugins.mllm.mllm_files import write_files

AR, CL = 20, 100


@pytest.mark.variant
@pytest.mark.needs("libatomic1")
def test_both_contracts_compute_the_same_bits(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    files = write_files(make_checkpoint, tmp_path / "m", cl=CL)
    toolchain, cache = OrtQnnToolchain(), tmp_path / "cache"
    target = files.target(emulator=True)
    outputs = {
        contract.name: plan_context(
            files, "m", AR, target, cache, toolchain, contract=contract
        ).outputs()
        for contract in (MLLM, GENIE)
    }
    container = GenAIContainer.load(outputs["mllm"].container)
    assert container.metadata.contract == "mllm"
    (binary,) = outputs["mllm"].binaries
    graphs = toolchain.inspect(binary).graphs
    assert sorted(graph.name for graph in graphs) == ["model.0.s1", f"model.0.s{AR}"]
    assert find_fault(graphs, AR) is None
    _import_again(binary, files, container, tmp_path)
    assert find_fault(graphs, 32) == f"it has no graph model.0.s32, but model.0.s1, model.0.s{AR}"

    rng = np.random.default_rng(1)
    prefill = next(graph for graph in graphs if graph.name == f"model.0.s{AR}")
    own = {
        tensor.name: rng.integers(0, 256, tensor.shape).astype(tensor.dtype)
        for tensor in prefill.inputs
        if tensor.name.startswith("past")
    }
    mask = np.zeros((1, 1, AR, CL), np.uint16)
    mask[..., : AR // 2] = 65535
    mask[..., CL - AR :] = np.tril(np.full((AR, AR), 65535, np.uint16))
    ids = rng.integers(0, 300, (1, AR)).astype(np.int32)
    positions = np.arange(AR // 2, AR // 2 + AR, dtype=np.int32)
    shared: dict[str, np.ndarray] = {"input_ids": ids, "attention_mask": mask}
    found = toolchain.execute(binary, prefill.name, {**shared, **own, "position_ids": positions})

    (binary,) = outputs["genie"].binaries
    plain = next(g for g in toolchain.inspect(binary).graphs if g.name.startswith(f"ar{AR}_"))
    given = {f"{name}_in": np.ascontiguousarray(np.swapaxes(a, 0, 1)) for name, a in own.items()}
    config = load_config(outputs["genie"].export / "config.json")
    for name, table in zip(("cos", "sin"), rope_tables(config, CL), strict=True):
        encoding = plain.tensor(f"position_ids_{name}").encoding
        assert encoding is not None
        rows = np.floor(table[positions].astype(np.float64) / encoding.scale) - encoding.offset
        given[f"position_ids_{name}"] = np.clip(rows, 0, 65535).astype(np.uint16)[None, None]
    expected = toolchain.execute(binary, plain.name, {**shared, **given})
    np.testing.assert_array_equal(found["logits"][0], expected["logits"])
    for name, values in expected.items():
        if name != "logits":
            ours = found[name.replace("past", "present").removesuffix("_out")]
            np.testing.assert_array_equal(np.swapaxes(ours, 0, 1), values)


def _import_again(binary: Path, files: MllmFiles, container: GenAIContainer, folder: Path) -> None:
    """Import the binary with what stands beside it; it is the same container."""
    shutil.copy(binary, files.parameters.parent / "m.bin")
    target = files.target(emulator=True)
    imported = import_artifact(files.parameters.parent, folder / "imported", target=target)
    for one in ("contract", "target", "graphs"):
        assert getattr(imported.metadata, one) == getattr(container.metadata, one)
    assert imported.genie_config.dialog.context == container.genie_config.dialog.context
    shutil.copy(binary, files.parameters.parent / "n.bin")
    with pytest.raises(InputFileError, match="one file"):
        import_artifact(files.parameters.parent, folder / "second", target=target)


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
