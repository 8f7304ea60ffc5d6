"""A container with an op package on a virtual device: runtimes compute by its kernel."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from buildlib.builder_options import apply_options
from buildlib.container.container import GenAIContainer
from buildlib.container.op_packages import OpPackage, registrations
from harness.cli.inspect import inspect
from harness.devices.device import Device
from harness.errors import RunnerError, RuntimeChoiceError
from harness.runtimes.base import GenerationRequest, RuntimeOptions, StepWindow
from harness.runtimes.bundles.sources import PROGRAMS
from harness.runtimes.deployed import runner_command
from harness.runtimes.genie.runtime import GenieModel, GenieRuntime, genie_bundle
from tests.builders import builder_for
from tests.buildlib.op_packages import PROVIDER, build_package, scale_logits

OPTIONS = RuntimeOptions(runner_timeout_s=120)


def build_scaled(export: Path, text: str, cache: Path, folder: Path) -> GenAIContainer:
    """Build a model whose logits are 3 x + 1 by the example's kernel in C."""
    shutil.copytree(export, folder / "scaled")
    scale_logits(folder / "scaled")
    targets = {"x86_64": str(build_package(folder / "x86_64.so"))}
    entry = {"name": "Scale", "interface_provider": PROVIDER, "targets": targets}
    builder = builder_for(folder / "scaled", cache, [1], [96], text=text)
    apply_options(builder, {"op_packages": [entry]})
    return builder.build()


@pytest.fixture(scope="module")
def scaled(
    one_layer_export: Path,
    tiny_text: str,
    build_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> GenAIContainer:
    return build_scaled(
        one_layer_export, tiny_text, build_cache, tmp_path_factory.mktemp("one-layer")
    )


def test_the_environment_of_runners_names_mllms_package_in_order() -> None:
    package = OpPackage(
        name="QnnLLaMAPackage",
        interface_provider="LLaMAPackageInterfaceProvider",
        targets={"hexagon-v75": "htp.so", "aarch64-android": "cpu.so"},
    ).in_container()
    command = runner_command("genie_t2t_run.py", registrations([package]))
    plain = runner_command("genie_t2t_run.py")
    (variable,) = [word for word in command if word not in plain]
    assert variable == (
        "QNNFARM_OP_PACKAGES=libQnnLLaMAPackage_CPU.so:LLaMAPackageInterfaceProvider:CPU "
        "libQnnLLaMAPackage_HTP.so:LLaMAPackageInterfaceProvider:HTP"
    )
    assert (command[0], command[-2:]) == ("env", ("python3", "genie_t2t_run.py"))


def start(device: Device, container: GenAIContainer) -> GenieRuntime:
    return GenieRuntime(device, device.properties(), container, OPTIONS)


@pytest.mark.variant
@pytest.mark.needs("plugins.diagnosis")
def test_logits_are_those_of_the_kernel_under_genie_and_by_graphs_alone(
    virtual_device: Device, tiny_export: Path, tiny_text: str, build_cache: Path, tmp_path: Path
) -> None:
    from plugins.diagnosis.graph_runtime import GraphRuntime

    plain = builder_for(tiny_export, build_cache, [1], [96], text=tiny_text).build()
    scaled = build_scaled(tiny_export, tiny_text, build_cache, tmp_path)
    window = StepWindow(prompt=(40, 41, 42), following=(43, 44, 45))
    runtimes: dict[str, GenieRuntime | GraphRuntime] = {
        "plain": start(virtual_device, plain),
        "genie": start(virtual_device, scaled),
        "graph": GraphRuntime(virtual_device, virtual_device.properties(), scaled, OPTIONS),
    }
    logits = {name: one.decode_steps([window]).windows[0] for name, one in runtimes.items()}
    for runtime in runtimes.values():
        runtime.clean()
    expected = 3 * logits["plain"] + 1
    assert np.abs(logits["genie"] - expected).max() < 0.02 * np.ptp(expected)
    assert np.abs(logits["genie"] - logits["plain"]).max() > 0.5 * np.ptp(logits["plain"])
    assert np.array_equal(logits["graph"], logits["genie"])


def test_children_of_a_runner_register_too(
    virtual_device: Device, scaled: GenAIContainer, tiny_text: str
) -> None:
    runtime = start(virtual_device, scaled)
    (window,) = GenieModel(scaled).windows(tiny_text, 1)
    assert runtime.score([window]).perplexity > 1
    runtime.clean()


def test_inspect_shows_what_a_container_registers(
    scaled: GenAIContainer, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(scaled.path)
    sha256 = scaled.metadata.files["libScale_CPU.so"].sha256
    assert f"libScale_CPU.so:{PROVIDER}:CPU sha256:{sha256[:16]}" in capsys.readouterr().out


def test_a_package_that_nobody_registers_is_named(
    virtual_device: Device, scaled: GenAIContainer
) -> None:
    metadata = scaled.metadata.model_copy(update={"op_packages": ()})
    runtime = start(virtual_device, replace(scaled, metadata=metadata))
    with pytest.raises(RunnerError) as caught:
        runtime.generate(GenerationRequest(2, prompt="In"))
    runtime.clean()
    assert "op package" in str(caught.value)


def test_a_device_without_python_is_refused(
    virtual_device: Device, scaled: GenAIContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = genie_bundle(scaled, "x86_64")
    bundle = bundle.add(dict.fromkeys(PROGRAMS, bundle.files["libGenie.so"]))
    monkeypatch.setattr(GenieRuntime, "bundle_of", staticmethod(lambda *_: bundle))
    with pytest.raises(RuntimeChoiceError, match="needs Python"):
        start(virtual_device, scaled)
