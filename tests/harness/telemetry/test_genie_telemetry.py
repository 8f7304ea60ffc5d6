"""Genie on a virtual device, sampled while it answers."""

import time
from collections.abc import Callable
from pathlib import Path

from buildlib.container.container import GenAIContainer
from harness.devices.device import Device
from harness.results.derived import find_charge_fault, find_power
from harness.runtimes.base import GenerationRequest, RuntimeOptions
from harness.runtimes.genie.runtime import GenieRuntime
from plugins.virtual_android import manager


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


def test_energy_is_that_of_the_battery_while_no_charger_is_on(
    make_virtual_device: Callable[..., tuple[manager.VirtualDevice, Device]], small_bundle: Path
) -> None:
    virtual, device = make_virtual_device()
    heat = manager.control(virtual.name).heat
    heat(temperature_c=40, capacity_j_per_k=1e5, load_w=4, charging=False)
    container = GenAIContainer.load(small_bundle)
    runtime = GenieRuntime(device, device.properties(), container, RuntimeOptions(telemetry_hz=20))
    prompt = "In the beginning"
    try:
        # A busy host samples less often than asked: so many tokens as it takes for its readings.
        for tokens in (60, 160, 320):
            found = runtime.generate(GenerationRequest(tokens, prompt=prompt))
            if "decode_energy_j_per_token" in found.metrics:
                break
        heat(charging=True)
        charged = runtime.generate(GenerationRequest(10, prompt=prompt))
    finally:
        runtime.clean()
    power = find_power(found.telemetry)
    assert power is not None
    watts = [value for value in power.values if value is not None]
    energy = found.metrics["decode_energy_j_per_token"]
    decode_w = energy * found.metrics["decode_tokens_per_s"]
    assert min(watts) <= decode_w <= max(watts)
    assert (
        found.metrics["decode_energy_j_per_token_error"]
        < found.metrics["decode_energy_j_per_token"] / 4
    )
    assert found.metrics["itl_p50_s"] <= found.metrics["itl_p95_s"]
    assert "itl_p99_s" not in charged.metrics
    assert find_charge_fault(found.telemetry) == ""
    assert not any("_j_per_token" in key for key in charged.metrics)
    assert "a charger was on" in find_charge_fault(charged.telemetry)


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
