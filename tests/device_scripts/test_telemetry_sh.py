"""The sampler under a phone's shell and tools, over a folder that looks like a phone's sysfs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.device_scripts.conftest import SCRIPTS, DeviceShell, marked_processes
from tests.harness.telemetry.phone import make_sysfs
from tests.system import program
from tests.waiting import wait_for

_END = re.compile(r"qnnfarm-telemetry end=(\w+) samples=(\d+) cpu_ticks=(\d+) elapsed_cs=(-?\d+)")


@pytest.fixture
def sysfs(device: DeviceShell, tmp_path: Path) -> Iterator[Path]:
    root = make_sysfs(tmp_path / "a sysfs")
    device.environment["QNNFARM_SYS_ROOT"] = str(root)
    yield root
    for path in root.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)


def arm(device: DeviceShell, period_cs: int = 10) -> Path:
    run_dir = device.make_run()
    done = device.run("telemetry.sh", "arm", run_dir, str(period_cs))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"qnnfarm-telemetry armed period_cs={period_cs}\n"
    return run_dir


def recorded(run_dir: Path) -> list[str]:
    return (run_dir / ".qnnfarm/telemetry").read_text().splitlines()


def end_of(run_dir: Path) -> tuple[str, ...]:
    match = _END.fullmatch(recorded(run_dir)[-1])
    assert match, recorded(run_dir)[-1]
    return match.groups()


def channels(lines: list[str]) -> dict[str, int]:
    words = [line.split() for line in lines if line.startswith("channel ")]
    return {name: int(number) for _, number, _, name in words}


def test_once_tells_channels_values_and_battery(device: DeviceShell, sysfs: Path) -> None:
    done = device.run("telemetry.sh", "once")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    names = channels(lines)
    assert list(names.values()) == list(range(len(names)))
    sample = next(line for line in lines if line.startswith("s ")).split()[3:]
    value = {name: sample[number] for name, number in names.items() if number < len(sample)}
    assert value["cpu_hz:0"] == "1804800"
    assert value["cpu_cap_hz:6"] == "4320000"
    assert value["ddr_hz"] == "4224000000"
    assert value["battery_a"] == "-350000"
    assert value["battery_v"] == "4012000"
    assert value["temp_c:nsphvx-0"] == "36000"
    # CPUs that share a clock are one channel. Zones of limits are left out, the NPU's is first.
    assert [name for name in names if name.startswith("cpu_hz:")] == ["cpu_hz:0", "cpu_hz:6"]
    zones = [name.partition(":")[2] for name in names if name.startswith("temp_c:")]
    assert zones[0] == "nsphvx-0"
    assert not {"pm8550-bcl-lvl0", "soc"} & set(zones)
    assert "zone9" in zones  # its type is no word that could stand in a line
    assert "battery status Not charging" in lines
    assert "battery capacity 81" in lines
    assert lines[-1].startswith("qnnfarm-telemetry end=once ")


def test_of_many_zones_the_telling_ones_are_chosen(device: DeviceShell, sysfs: Path) -> None:
    for number in range(20, 110):
        folder = sysfs / f"class/thermal/thermal_zone{number}"
        folder.mkdir()
        (folder / "type").write_text(f"cpu-{number}\n" if number < 60 else f"aoss-{number}\n")
        (folder / "temp").write_text("40000\n")
    names = channels(device.run("telemetry.sh", "once").stdout.splitlines())
    zones = [name.partition(":")[2] for name in names if name.startswith("temp_c:")]
    assert len(zones) == 12
    assert {"nsphvx-0", "skin-msm-therm", "xo-therm", "gpuss-0", "ddr", "battery"} <= set(zones)
    assert sum(zone.startswith("cpu-") for zone in zones) >= 3


@pytest.mark.needs("util-linux")
def test_denied_files_are_reported(device: DeviceShell, sysfs: Path, tmp_path: Path) -> None:
    for name in ("current_now", "voltage_now"):
        (sysfs / "class/power_supply/battery" / name).chmod(0)
    (sysfs / "class/thermal/thermal_zone1/temp").write_text("")
    scripts = shutil.copytree(SCRIPTS, tmp_path / "scripts")
    # Root may read files of any mode by these capabilities alone.
    unprivileged = "--bounding-set=-dac_override,-dac_read_search" if os.geteuid() == 0 else "--"
    done = subprocess.run(
        [program("setpriv"), unprivileged, device.shell, scripts / "telemetry.sh", "once"],
        env=device.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert "denied class/power_supply/battery/current_now" in lines
    assert "denied class/power_supply/battery/voltage_now" in lines
    assert "silent class/thermal/thermal_zone1/temp" in lines
    assert "battery_v" not in channels(lines)


def samples_of(run_dir: Path) -> list[str]:
    return [line for line in _lines(run_dir) if line.startswith("s ")]


def _lines(run_dir: Path) -> list[str]:
    try:
        return recorded(run_dir)
    except OSError:
        return []


def most_memory(run_dir: Path) -> int:
    """The most that a sample tells of a run's memory, in bytes."""
    column = 3 + channels(_lines(run_dir)).get("rss_bytes", 0)
    words = [line.split(" / ")[0].split() for line in samples_of(run_dir)]
    pages = [int(word[column]) for word in words if column < len(word)]
    return max(pages, default=0) * os.sysconf("SC_PAGESIZE")


_HOLDING = """\
import os, time; held = bytearray(90 << 20)
while not os.path.exists("over"): time.sleep(0.02)
"""
"""A program that holds memory until a file `over` is made beside it."""


@contextmanager
def held(device: DeviceShell, run_dir: Path, command: list[str]) -> Iterator[None]:
    """A run that goes on until the end of the block, and must end well then."""
    process = device.start("run.sh", run_dir, "250", "log", "--", *command)
    try:
        yield
    finally:
        (run_dir / "over").touch()
        process.communicate()
    assert process.returncode == 0, (run_dir / "log").read_text()


def test_a_run_is_sampled_from_its_begin_to_its_end(device: DeviceShell, sysfs: Path) -> None:
    run_dir = arm(device)
    temperature = sysfs / "class/thermal/thermal_zone1/temp"
    began = time.monotonic()
    child = f"exec 3>&1; '{sys.executable}' -S -c '{_HOLDING}'; true"
    with held(device, run_dir, ["sh", "-c", child]):
        wait_for(lambda: most_memory(run_dir) > 90 << 20)
        temperature.write_text("61000")
        wait_for(lambda: any(" 61000" in line for line in samples_of(run_dir)))
    passed_cs = (time.monotonic() - began) * 100
    lines, taken = recorded(run_dir), samples_of(run_dir)
    reason, samples, _, _ = end_of(run_dir)
    assert reason in {"exited", "stopped"}
    assert len(taken) == int(samples) >= 2
    times = [int(line.split()[1]) for line in taken]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= passed_cs + 2
    assert f"/ {channels(lines)['rss_peak_bytes']} " in "\n".join(taken)


def test_a_sampler_that_waits_long_still_says_how_it_ended(
    device: DeviceShell, sysfs: Path
) -> None:
    """On a busy device, or in the middle of a wait that nothing cuts short."""
    slow = device.with_tool(
        "sleep", 'case $1 in 0.2 | 0.02 | 0.1) ;; *) set -- 2 ;; esac\nreal "$@"'
    )
    run_dir = arm(slow)
    script = "until grep -q '^s ' .qnnfarm/telemetry 2>/dev/null; do sleep 0.1; done"
    done = slow.run("run.sh", run_dir, "200", "log", "--", "sh", "-c", script)
    assert done.returncode == 0
    assert end_of(run_dir)[0] in {"exited", "stopped"}


def test_a_run_that_was_not_armed_is_not_sampled(device: DeviceShell, sysfs: Path) -> None:
    run_dir = device.make_run()
    assert device.run("run.sh", run_dir, "20", "log", "--", "true").returncode == 0
    assert not (run_dir / ".qnnfarm/telemetry").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_run_sh(device: DeviceShell, sysfs: Path, number: signal.Signals) -> None:
    run_dir = arm(device)
    process = device.start("run.sh", run_dir, "60", "log", "--", "sleep", "311")
    wait_for(lambda: len(samples_of(run_dir)) >= 2)
    process.send_signal(number)
    process.communicate(timeout=200)
    wait_for(lambda: recorded(run_dir)[-1].startswith("qnnfarm-telemetry "))
    ends = {"stopped", "exited"} if number == signal.SIGTERM else {"orphaned"}
    assert end_of(run_dir)[0] in ends
    assert device.run("cleanup.sh", "-k", run_dir).returncode == 0
    assert marked_processes(run_dir) == []


def sample_of(
    device: DeviceShell,
    run_dir: Path,
    runner: "subprocess.Popen[bytes]",
    *,
    max_s: int,
    script: Path = SCRIPTS / "telemetry.sh",
) -> "subprocess.Popen[bytes]":
    """The sampler as run.sh starts it, for a command and a parent of the test's own."""
    began = Path("/proc/uptime").read_text().split()[0].split(".")
    words = [str(max_s), str(runner.pid), str(os.getpid()), *began]
    return subprocess.Popen(
        [device.shell, script, "sample", run_dir, "5", *words],
        env=device.environment,
        stdin=subprocess.PIPE,
    )


def test_waiting_takes_no_process_where_a_shell_can(device: DeviceShell, sysfs: Path) -> None:
    run_dir = arm(device)
    with (
        subprocess.Popen(["sleep", "250"]) as runner,
        sample_of(device, run_dir, runner, max_s=250) as sampler,
    ):
        wait_for(lambda: len(samples_of(run_dir)) >= 3)
        forks = "wait=fork" in recorded(run_dir)
        runner.kill()
        assert sampler.wait(timeout=200) == 0
    # dash alone, with nothing but toybox beside it, has to fork, and samples less often for it.
    assert forks == (Path(device.shell).name == "dash")
    assert ("period_cs=25" in recorded(run_dir)) == forks
    assert end_of(run_dir)[0] == "exited"


def test_dash_hands_over_to_a_shell_that_can_wait(
    device: DeviceShell, sysfs: Path, tmp_path: Path
) -> None:
    tools = tmp_path / "with mksh"
    tools.mkdir()
    (tools / "mksh").symlink_to("/usr/bin/mksh")
    device.environment["PATH"] = f"{device.environment['PATH']}:{tools}"
    done = subprocess.run(
        device.command("telemetry.sh", "once"),
        env=device.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "wait=read" in done.stdout.splitlines()
    assert "channel 0 kHz cpu_hz:0" in done.stdout


def test_hostile_contents_stay_in_their_place(device: DeviceShell, sysfs: Path) -> None:
    (sysfs / "class/thermal/thermal_zone1/type").write_text("a b\nchannel 0 kHz cpu_hz:9\n")
    (sysfs / "class/thermal/thermal_zone2/type").write_text("$(touch owned)`id`;*\n")
    (sysfs / "class/power_supply/battery/status").write_text("x" * 100_000)
    (sysfs / "class/power_supply/battery/voltage_now").write_text("1 2 3 4\n")
    done = device.run("telemetry.sh", "once")
    lines = done.stdout.splitlines()
    assert "channel 0 kHz cpu_hz:0" in lines
    assert not any("cpu_hz:9" in line or "owned" in line for line in lines)
    assert max(map(len, lines)) < 1100
    names = channels(lines)
    sample = next(line for line in lines if line.startswith("s ")).split()[3:]
    assert sample[names["battery_v"]] == "1"
    assert not list(Path.cwd().glob("owned"))


def test_arming_no_run_folder(device: DeviceShell) -> None:
    done = device.run("telemetry.sh", "arm", device.work_root / "runs/none", "10")
    assert done.returncode == 1
    assert "no run folder" in done.stderr


def test_it_ends_at_its_deadline(device: DeviceShell, sysfs: Path) -> None:
    run_dir = arm(device)
    with subprocess.Popen(["sleep", "60"]) as runner:
        words = ["1", str(runner.pid), str(os.getpid()), "0", "0"]  # it began when the kernel did
        done = device.run("telemetry.sh", "sample", run_dir, "5", *words)
        runner.kill()
    assert done.returncode == 0
    assert end_of(run_dir)[0] == "deadline"


@pytest.mark.parametrize(
    ("constant", "value", "end"), [("dense_lines", 4, "exited"), ("max_bytes", 400, "full")]
)
def test_the_recording_of_a_long_run_is_bounded(
    device: DeviceShell, sysfs: Path, tmp_path: Path, constant: str, value: int, end: str
) -> None:
    run_dir = arm(device)
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    text = (SCRIPTS / "telemetry.sh").read_text()
    changed = re.sub(rf"^{constant}=\d+", f"{constant}={value}", text, flags=re.MULTILINE)
    assert changed != text
    (scripts / "telemetry.sh").write_text(changed.replace("thin_lines=3000", "thin_lines=3"))
    for name in ("common.sh", "marked.sh", "sensors.sh", "sha256.sh"):
        (scripts / name).write_bytes((SCRIPTS / name).read_bytes())
    with (
        subprocess.Popen(["sleep", "250"]) as runner,
        sample_of(device, run_dir, runner, max_s=250, script=scripts / "telemetry.sh") as sampler,
    ):
        try:
            if end == "exited":
                wait_for(lambda: len(samples_of(run_dir)) >= 10)
        finally:
            if end == "exited":
                runner.kill()
        assert sampler.wait(timeout=200) == 0
        runner.kill()
    assert end_of(run_dir)[0] == end
    times = [int(line.split()[1]) for line in samples_of(run_dir)]
    if end == "full":
        assert len(times) < 10
    else:
        # The first 4 waits are of the full rate, each 3 that follow twice as long. No sample is
        # taken before it is due, however late others were.
        period_cs = int(next(one for one in recorded(run_dir) if one.startswith("period_cs="))[10:])
        waits_cs = [period_cs * 2 ** max(0, (taken - 2) // 3) for taken in range(1, len(times))]
        assert times[-1] - times[0] >= sum(waits_cs) - len(times)
