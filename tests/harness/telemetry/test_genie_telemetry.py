"""Genie on a virtual device, sampled while it answers."""

import time
from pathlib import Path

from buildlib.container.container import GenAIContainer
from harness.devices.device import Device
from harness.runtimes.base import GenerationRequest, RuntimeOptions
from harness.runtimes.genie.runtime import GenieRuntime


def test_generation_is_sampled_when_asked(virtual_device: Device, small_bundle: Path) -> None:
    container = GenAIContainer.load(small_bundle)
    properties = virtual_device.properties()
    runtime = GenieRuntime(virtual_device, properties, container, RuntimeOptions(telemetry_hz=20.0))
    try:
        request = GenerationRequest(40, prompt="In the beginning")
        began = time.monotonic()
        sampled = runtime.generate(request)
        passed_s = time.monotonic() - began
        again = runtime.generate(GenerationRequest(1, prompt="In the beginning"))
    finally:
        runtime.clean()
    memory = next(one for one in sampled.telemetry if one.channel == "rss_bytes")
    known = [value for value in memory.values if value is not None]
    assert len(known) >= 3
    assert 50e6 < max(known) <= sampled.metrics["peak_rss_bytes"] * 1.05
    assert 0 <= memory.t_s[0] < memory.t_s[-1] <= passed_s
    assert again.telemetry != sampled.telemetry


def test_without_being_asked_nothing_is_sampled(virtual_device: Device, small_bundle: Path) -> None:
    container = GenAIContainer.load(small_bundle)
    runtime = GenieRuntime(virtual_device, virtual_device.properties(), container)
    try:
        result = runtime.generate(GenerationRequest(1, prompt="In the beginning"))
        state = f"{runtime.prepare().run_dir}/.qnnfarm"
        listed = virtual_device.shell(["ls", state]).stdout
    finally:
        runtime.clean()
    assert result.telemetry == ()
    assert "telemetry" not in listed
