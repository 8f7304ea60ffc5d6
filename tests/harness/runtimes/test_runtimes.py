"""Runtimes beside Genie: found by name, asked for what they can do, told apart in results."""
# ruff: noqa: F401, F811 - a fixture of another module

import hashlib
from pathlib import Path

import pytest

from harness.deploy.deploy import store_usage
from harness.devices.device import Device
from harness.errors import RuntimeChoiceError, WrongUseError
from harness.results import frames
from harness.results.identity import Subject
from harness.results.llama_bench import backend
from harness.results.store import ResultsStore
from harness.runtimes import registry
from harness.runtimes.base import (
    Converses,
    DecodesSteps,
    Generates,
    MeasuresSpeed,
    Scores,
    require,
)
from harness.runtimes.bundles.bundle import pushed_files
from harness.runtimes.genie.runtime import GenieRuntime
from harness.workloads.base import Recording
from harness.workloads.bench import Bench
from harness.workloads.dialog import Dialog
from harness.workloads.generate import Generate
from harness.workloads.perplexity import Perplexity
from harness.workloads.registry import AnyWorkload
from harness.workloads.session import Session, SessionOptions
from tests.buildlib.op_packages import build_library
from tests.harness.runtimes.stopwatch import StopwatchRuntime, script


def test_an_unknown_runtime_is_named_with_those_there_are(script: Path) -> None:
    with pytest.raises(WrongUseError, match=r"called 'geni': there are genie, .*stop"):
        registry.open_model(script, "geni")


def test_a_runtime_of_a_plugin_that_is_not_here_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "runtimes", lambda: ("genie",))
    with pytest.raises(ValueError, match="plugins/diagnosis, which is not here"):
        registry.check_runtime("graph")


def test_capabilities_show_from_methods_before_there_is_a_device() -> None:
    require(GenieRuntime, (Generates, Converses, Scores, DecodesSteps))
    require(StopwatchRuntime, [(Generates, MeasuresSpeed)])
    with pytest.raises(WrongUseError, match="runtime genie cannot measure its speed"):
        require(GenieRuntime, [MeasuresSpeed])


@pytest.mark.parametrize(
    ("workload", "ability"),
    [
        (Generate.of(prompt="x"), "answer prompts"),
        (Generate.of(prompt=("x", "y")), "hold conversations"),
        (Dialog.of(dialogs=(("x",),)), "hold conversations"),
        (Perplexity.of(text="x"), "score texts"),
        (Bench.of(max_perplexity=3.0), "score texts"),
        (Bench.of(reference_tokens="x"), "answer prompts"),
        (Bench.of(lora={"red": 1.0}), "adapters"),
    ],
)
def test_a_workload_says_what_the_runtime_cannot_do(
    script: Path, workload: AnyWorkload, ability: str
) -> None:
    with pytest.raises(WrongUseError, match=ability) as caught:
        workload.check(registry.open_model(script, "stopwatch"))
    assert "\n" not in str(caught.value)


def test_a_file_that_the_device_cannot_load_is_refused_before_any_push(
    script: Path, virtual_device: Device, tmp_path: Path
) -> None:
    library = build_library(tmp_path / "libX.so", "int x;", machine="aarch64")
    options = SessionOptions(push=pushed_files([str(library)]))
    model = registry.open_model(script, "stopwatch")
    with Session(virtual_device, model, options) as session:
        with pytest.raises(RuntimeChoiceError, match=r"libX\.so is for aarch64"):
            session.runtime.prepare()
        held = {entry.sha256 for entry in store_usage(virtual_device).entries}
    assert hashlib.sha256(library.read_bytes()).hexdigest() not in held


def test_a_runtime_without_a_text_is_measured_and_told_apart(
    script: Path, virtual_device: Device, tmp_path: Path
) -> None:
    bench = Bench.of(prompt_tokens=8, new_tokens=4, repetitions=2)
    model = registry.open_model(script, "stopwatch")
    bench.check(model)
    with (
        ResultsStore.open(tmp_path / "results.db") as store,
        Session(virtual_device, model) as session,
    ):
        run = bench.run(session, Recording(lambda: store)).output
        kept = store.get_run(run.id)
    assert frames(tmp_path / "results.db").runs["runtime"].tolist() == ["stopwatch"]
    assert kept.values("prefill_tokens_per_s") == (16.0, 16.0)
    assert kept.values("decode_tokens_per_s") == (4.0, 4.0)
    assert kept.workload.runner_sha256 == model.info.sha256
    assert (kept.workload.runtime, kept.check.outcome) == ("stopwatch", "none")
    assert backend(kept) == "stopwatch"
    subject = Subject.of(kept)
    plain = {key: value for key, value in kept.workload.sampler.items() if key != "runtime"}
    workload = kept.workload.model_copy(update={"sampler": plain})
    genie = Subject.of(kept.model_copy(update={"workload": workload}))
    assert subject.differences(genie) == {"runtime": ("stopwatch", "genie")}
    assert subject.id != genie.id
