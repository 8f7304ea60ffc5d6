"""Reading what a device prints about itself, also when it prints nonsense."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.devices.base import Battery
from harness.devices.properties import (
    HARDWARE,
    clocks_of,
    parse,
    parse_battery,
    parse_df,
    parse_getprop,
    properties_from,
    ram_of,
)

_BATTERY = """\
Current Battery Service state:
  AC powered: false
  USB powered: true
  Max charging current: 500000
  status: 2
  level: 42
  scale: 50
  temperature: 317
"""


def test_a_phone() -> None:
    props = parse_getprop(
        "[ro.soc.model]: [SM8650]\r\n[ro.serialno]: [R58]\n[ro.product.model]: [a]: [b]\n"
        "[ro.build.version.sdk]: [34]\n[ro.build.version.release]: [14]\n[x]: [line\n[y] two]\n"
    )
    assert props["x"] == "line\n[y] two"
    found = properties_from("s", props, 5, None)
    assert (found.soc, found.hexagon, found.sdk, found.emulator) == ("SM8650", "v75", 34, False)
    assert found.model == "a]: [b"


def test_an_emulator_and_an_soc_that_nobody_knows() -> None:
    props = {"ro.boot.qemu": "1", "ro.soc.model": "MT\x1b[31m9", "ro.build.version.sdk": "x"}
    found = properties_from("s", props, None, None)
    assert found.emulator
    assert found.hexagon is None
    assert found.sdk is None
    assert found.soc.isprintable()


def test_battery() -> None:
    assert parse_battery(_BATTERY) == Battery(84.0, 31.7, charging=True)
    assert parse_battery("Can't find service: battery") is None


@pytest.mark.parametrize(
    ("status", "charging"), [("1", True), ("2", True), ("3", False), ("4", False), ("5", False)]
)
def test_a_battery_with_a_charger_that_does_not_charge(status: str, charging: bool) -> None:
    battery = parse_battery(_BATTERY.replace("status: 2", f"status: {status}"))
    assert battery is not None
    assert battery.charging is charging


def test_free_space() -> None:
    two = "Filesystem 1K-blocks Used Available Use% Mounted on\n/dev/x y 100 40 60 40% /data\n"
    assert parse_df(two) == 60 * 1024
    assert parse_df("df: /x: No such file or directory") is None


@given(st.text(max_size=300))
def test_any_output_is_survived(output: str) -> None:
    properties_from("s", parse_getprop(output), parse_df(output), parse_battery(output))


def test_memory_and_the_limits_of_clocks() -> None:
    said = parse(
        "@@battery\n  level: 3\n\n@@memory\nMemTotal:   15728640 kB\n\n@@clocks\n"
        "cpu0=3532800/3532800/0\ncpu1=3532800/3532800/0\ncpu6=2000000//\ncpu7=x/1/7\n"
    )
    found = properties_from("s", {"ro.build.id": "AP3A"}, None, None, said)
    assert (found.ram_bytes, found.build) == (15 << 30, "AP3A")
    assert found.clocks == {
        "cpu_cap_hz:0": 3.5328e9, "cpu_max_hz:0": 3.5328e9, "cpu_cap_hz:6": 2e9,
    }  # fmt: skip


def test_this_machine_tells_its_memory() -> None:
    shown = subprocess.run(["sh", "-c", HARDWARE], capture_output=True, text=True, check=True)
    said = parse(shown.stdout)
    assert (ram_of(said) or 0) > 1 << 28
    assert all(value > 0 for value in clocks_of(said).values())
