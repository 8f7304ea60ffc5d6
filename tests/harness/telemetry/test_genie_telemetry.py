"""Genie on a virtual device, sampled while it answers."""

from pathlib import Path

from buildlib.container.container import GenAIContainer
from harness.devices.adb import AdbDevice
from harness.runtimes.base import GenerationRequest
from harness.runtimes.genie import GenieRuntime


def test_generation_is_sampled_when_asked(virtual_device: AdbDevice, tiny_bundle: Path) -> None:
    container = GenAIContainer.load(tiny_bundle)
    properties = virtual_device.properties()
    runtime = GenieRuntime(virtual_device, properties, container, telemetry_hz=20.0)
    try:
        request = GenerationRequest(40, prompt="In the beginning")
        sampled = runtime.generate(request)
        again = runtime.generate(GenerationRequest(2, prompt="In the beginning"))
    finally:
        runtime.clean()
    memory = next(one for one in sampled.telemetry if one.channel == "rss_bytes")
    known = [value for value in memory.values if value is not None]
    assert len(known) >= 3
    assert 50e6 < max(known) <= sampled.metrics["peak_rss_bytes"] * 1.05
    assert memory.t_s[0] < 5
    assert again.telemetry != sampled.telemetry


def test_without_being_asked_nothing_is_sampled(
    virtual_device: AdbDevice, tiny_bundle: Path
) -> None:
    container = GenAIContainer.load(tiny_bundle)
    runtime = GenieRuntime(virtual_device, virtual_device.properties(), container)
    try:
        result = runtime.generate(GenerationRequest(2, prompt="In the beginning"))
        state = f"{runtime.prepare().run_dir}/.qnnfarm"
        listed = virtual_device.shell(["ls", state]).stdout
    finally:
        runtime.clean()
    assert result.telemetry == ()
    assert "telemetry" not in listed
