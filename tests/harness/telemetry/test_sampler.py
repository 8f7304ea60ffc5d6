"""Sampling runs: on this machine, and on a virtual device that gets hot."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.deploy.deploy import deploy, remove_run
from harness.deploy.deployment import DeployFile
from harness.devices.base import CommandResult
from harness.devices.device import Device
from harness.errors import DeviceCommandError
from harness.telemetry.sampler import Sampling, sampling
from harness.telemetry.throttling import judge_throttling
from plugins.virtual_android import manager
from tests.harness.telemetry.conftest import Here

MakeDevice = Callable[..., tuple[manager.VirtualDevice, Device]]


def run(device: Device, scripts_dir: str, run_dir: str, script: str) -> CommandResult:
    command = ["sh", f"{scripts_dir}/run.sh", run_dir, "250", "log", "--", "sh", "-c", script]
    return device.shell(command, timeout_s=280)


def until_sampled(count: int) -> str:
    """A script that goes on until so many samples were taken of it."""
    taken = "grep -c '^s ' .qnnfarm/telemetry 2>/dev/null"
    return f'until [ "$({taken})" -ge {count} ] 2>/dev/null; do sleep 0.1; done'


def test_a_run_is_sampled_in_the_units_of_its_channels(here: Here) -> None:
    with sampling(here.device, here.scripts_dir, here.run_dir, hz=20) as sampled:
        assert not sampled.recording.end
        run(here.device, here.scripts_dir, here.run_dir, until_sampled(3))
    series = {one.channel: one for one in sampled.series}
    assert series["temp_c:nsphvx-0"].values[0] == 36.0
    assert series["cpu_hz:0"].values[0] == 1804.8e6
    assert series["battery_v"].unit == "V"
    assert all(value and value > 1e5 for value in series["rss_bytes"].values)
    assert series["rss_bytes"].t_s[0] < series["rss_bytes"].t_s[-1]
    assert sampled.recording.end in {"exited", "stopped"}
    assert sampled.recording.dropped == 0


def test_sampling_ends_with_the_block(here: Here) -> None:
    with sampling(here.device, here.scripts_dir, here.run_dir):
        run(here.device, here.scripts_dir, here.run_dir, until_sampled(1))
    state = Path(here.run_dir) / ".qnnfarm"
    before = (state / "telemetry").read_bytes()
    run(here.device, here.scripts_dir, here.run_dir, "true")
    assert (state / "telemetry").read_bytes() == before
    assert not (state / "telemetry.period").exists()


def test_a_block_without_a_run_gives_nothing(here: Here) -> None:
    with sampling(here.device, here.scripts_dir, here.run_dir) as sampled:
        pass
    assert sampled.series == ()
    assert sampled.recording.end == ""


def test_samples_of_an_earlier_run_are_not_taken_for_this_one(here: Here) -> None:
    with sampling(here.device, here.scripts_dir, here.run_dir) as first:
        run(here.device, here.scripts_dir, here.run_dir, until_sampled(1))
    with sampling(here.device, here.scripts_dir, here.run_dir) as second:
        pass
    assert first.series
    assert not second.series


def test_a_run_that_fails_keeps_its_samples(here: Here) -> None:
    held: list[Sampling] = []

    def fail() -> None:
        with sampling(here.device, here.scripts_dir, here.run_dir) as sampled:
            held.append(sampled)
            run(here.device, here.scripts_dir, here.run_dir, f"{until_sampled(1)}; exit 3")

    with pytest.raises(DeviceCommandError):
        fail()
    assert held[0].series


@pytest.mark.parametrize("hz", [0, -1, 0.01, 20.5, 1000, float("nan")])
def test_a_rate_that_cannot_be(here: Here, hz: float) -> None:
    with (
        pytest.raises(ValueError, match="20 are possible"),
        sampling(here.device, here.scripts_dir, here.run_dir, hz=hz),
    ):
        pass


def test_a_hostile_sampler_gives_no_series(here: Here) -> None:
    with sampling(here.device, here.scripts_dir, here.run_dir) as sampled:
        hostile = (
            "channel 0 kHz cpu_hz:0\\ns 1 0 9999999999999999999999\\n$(id)\\n\\033[2J\\ns 2 0 x"
        )
        path = f"{here.run_dir}/.qnnfarm/telemetry"
        here.device.shell(["sh", "-c", 'printf "%b" "$1" >"$2"', "sh", hostile, path])
    assert sampled.series == ()
    assert sampled.recording.dropped > 0


def test_a_device_that_heats_up_is_seen_to_throttle(
    make_virtual_device: MakeDevice, tmp_path: Path
) -> None:
    virtual, device = make_virtual_device()
    manager.control(  # so sluggish that it stays as hot as it is told
        virtual.name
    ).heat(temperature_c=60, throttle_from_c=70, throttle_to_c=80, capacity_j_per_k=1e5)
    file = tmp_path / "file"
    file.write_text("x")
    deployment = deploy(device, {"file": DeployFile(file)}, run_id="hot")
    run_dir = deployment.run_dir
    try:
        with (
            sampling(device, deployment.scripts_dir, run_dir, hz=20) as sampled,
            ThreadPoolExecutor(1) as threads,
        ):
            ends = "until [ -e over ]; do sleep 0.1; done"
            ended = threads.submit(run, device, deployment.scripts_dir, run_dir, ends)
            try:
                device.shell(f"cd {run_dir}; {until_sampled(15)}", timeout_s=250)
                manager.control(virtual.name).heat(temperature_c=85)
                device.shell(f"cd {run_dir}; {until_sampled(30)}", timeout_s=250)
            finally:
                device.shell(["touch", f"{run_dir}/over"])
            ended.result()
    finally:
        remove_run(device, "hot")
    series = {one.channel: one for one in sampled.series}
    heat = [value for value in series["temp_c:cpuss-0"].values if value is not None]
    assert heat[-1] > heat[0] + 5
    assert series["battery_a"].unit == "A"
    verdict = judge_throttling(sampled.series)
    assert verdict.throttled is True, sampled.recording
    assert any("cpu_cap_hz" in reason for reason in verdict.reasons)
