"""Stages of a pipeline side by side, on the host and on a device."""

from pathlib import Path

import pytest

from harness.devices.device import Device
from harness.devices.spec import DeviceSpec
from harness.errors import ConfigFileError, PipelineError
from harness.results.perplexity import last_values
from harness.results.store import ResultsStore, RunFilter
from plugins.pipeline.llm import LLMPipeline
from tests.plugins.pipeline.conftest import MakeRecipe


@pytest.mark.variant
def test_stages_and_device_stand_side_by_side(
    built: LLMPipeline,
    virtual_device: Device,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = DeviceSpec("android", virtual_device.serial)
    found = built.compare(device=device, db=str(tmp_path / "results.db"))
    rows = {row.stage: row for row in found.stages}
    assert list(rows) == ["model_loader", "quantization", "genai_builder", "device"]
    assert (found.windows, found.tokens) == (1, 40)
    start = rows["model_loader"].values
    assert start["kl_divergence"] == 0.0
    assert start["top1_agreement"] == 1.0
    wanted = built.evaluate(stage="quantization")["PPL_heldout"]
    assert rows["quantization"].values["perplexity"] == pytest.approx(wanted, rel=1e-4)
    for stage in ("quantization", "genai_builder", "device"):
        values = rows[stage].values
        assert values["perplexity"] == pytest.approx(start["perplexity"], rel=0.02)
        assert 0 < values["kl_divergence"] < 0.01
        assert values["top1_agreement"] >= 0.9
    assert rows["device"].values["decode_tokens_per_s"] > 0
    assert not any("tokens_per_s" in key for row in found.stages[:3] for key in row.values)
    with ResultsStore.open(str(tmp_path / "results.db")) as store:
        runs = [run for run in store.list_runs(RunFilter()) if run.workload.perplexity]
    scored = [r for r in runs if r.workload.perplexity and r.workload.perplexity.windows == 1]
    kept = last_values(
        next(run for run in scored if "perplexity_quantized_cpu" in last_values(run))
    )
    assert kept["perplexity_float"] == pytest.approx(start["perplexity"])
    assert kept["perplexity_quantized_cpu"] == rows["quantization"].values["perplexity"]
    [entry] = [one for one in built.manifest.stages if one.name == "quantization"]
    assert entry.metrics["kl_divergence"] == rows["quantization"].values["kl_divergence"]
    found.print()
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].split()[:2] == ["stage", "runs"]
    assert len(printed.out.splitlines()) == 6  # the device has a line of its own below
    assert "says nothing about hardware speed" in printed.err


@pytest.mark.needs("libatomic1")
def test_a_stage_that_cannot_run_here_says_why(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    pipe = LLMPipeline.from_pretrained(
        recipe=make_recipe(cache_dir=str(tmp_path), evaluator_config=None)
    )
    with pytest.raises(PipelineError, match=r"compare\(\) needs a finished stage"):
        pipe.compare()
    pipe.construct(until="model_loader")
    with pytest.raises(ConfigFileError, match="evaluator_config"):
        pipe.compare()
    [row] = pipe.compare(text="In the beginning " * 60, windows=1).stages
    assert row.where == "CPU, float"
    with pytest.raises(PipelineError, match="genai_builder first"):
        pipe.compare(text="In the beginning " * 60, windows=1, device="virtual:none")
