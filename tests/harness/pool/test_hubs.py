"""USB hubs, by a `uhubctl` on the PATH that is ours: a port that is off takes its devices away."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import adbutils
import pytest

from harness.devices.adb.client import AdbServer
from harness.devices.spec import DeviceSpec
from harness.errors import PoolError
from harness.pool.config import HubPort, parse_config
from harness.pool.hubs import cycle_power, parse_hubs
from harness.pool.members import Member
from harness.pool.opener import Opener
from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from harness.pool.states import MemberState
from harness.virtual_device import manager
from tests.harness.pool.conftest import close
from tools import map_hub
from tools.map_hub import HubMapper, map_hub_ports

UHUBCTL = f"""#!/bin/sh
folder=${{0%/*}}
echo "$*" >>"$folder/calls"
if [ "$*" = -f ]; then
    [ -s "$folder/status" ] && exec cat "$folder/status"
    echo "No compatible devices detected!" >&2
    exit 1
fi
while [ $# -ge 2 ]; do
    case $1 in -l) hub=$2 ;; -p) port=$2 ;; -a) action=$2 ;; esac
    shift 2
done
there=$folder/$hub.$port
if [ -e "$there.fails" ]; then
    echo "Permission denied. Try running as root (sudo)." >&2
    exit 1
fi
case $action in
    off) actions=disconnect ;;
    on) actions=connect ;;
    cycle) actions="disconnect connect" ;;
esac
for action in $actions; do
    while read -r serial; do
        {adbutils.adb_path()} "$action" "$serial" </dev/null >/dev/null
    done <"$there.serials"
done
"""

Hubs = Callable[[Mapping[str, Any]], None]


@pytest.fixture
def set_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hubs:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "uhubctl").write_text(UHUBCTL)
    (folder / "uhubctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(map_hub, "_TOGETHER_S", 0.3)

    def set_to(content: Mapping[str, Any]) -> None:
        for old in (*folder.glob("*.serials"), *folder.glob("*.fails")):
            old.unlink()
        lines: list[str] = []
        for location, hub in content.items():
            about = f"2109:2813 VIA Labs USB2.0 Hub, USB 2.10, 4 ports, {hub['kind']}"
            lines.append(f"Current status for hub {location} [{about}]")
            for number, there in hub["ports"].items():
                if not there:
                    lines.append(f"  Port {number}: 0100 power")
                    continue
                lines.append(f"  Port {number}: 0503 power enable connect [{there['said']}]")
                serials = "".join(f"{serial}\n" for serial in there["serials"])
                (folder / f"{location}.{number}.serials").write_text(serials)
                if "fails" in there:
                    (folder / f"{location}.{number}.fails").touch()
        (folder / "status").write_text("".join(f"{line}\n" for line in lines))

    return set_to


def port(*serials: str, said: str = "") -> dict[str, object]:
    return {"serials": serials, "said": said or f"18d1:4ee7 Google Pixel {' '.join(serials)}"}


def hub(kind: str = "ppps", **ports: object) -> dict[str, object]:
    return {"kind": kind, "ports": {name[1:]: there for name, there in ports.items()}}


def switched(tmp_path: Path) -> list[str]:
    calls = (tmp_path / "bin" / "calls").read_text().splitlines()
    return [call for call in calls if call != "-f"]


@pytest.fixture
def phones(two_devices: tuple[manager.VirtualDevice, ...]) -> list[str]:
    return [device.serial for device in two_devices]


def make_pool(tmp_path: Path, phones: list[str], text: str = "") -> Pool:
    config = parse_config(text)
    members = [
        Member(f"p{n}", DeviceSpec("android", serial), hub=config.hubs.get(f"p{n}"))
        for n, serial in enumerate(phones)
    ]
    return Pool(members, config, Opener(config), ledger=tmp_path / "p.db")


def test_each_phone_is_found_on_its_port(
    set_hubs: Hubs, phones: list[str], adb_server: AdbServer, tmp_path: Path
) -> None:
    first, second = phones
    set_hubs({
        "1": hub("nops", p1=port(said="2109:2813 VIA Labs USB2.0 Hub")),
        "1-1": hub(p1=port(said="0781:5581 SanDisk Ultra"), p2=port(first), p3=None),
        "1-1.4": hub(p1=port(second)),
    })  # fmt: skip
    told: list[str] = []
    pool = make_pool(tmp_path, phones)
    found = map_hub_ports(pool, adb_server, told.append)
    assert found == {"p0": HubPort(hub="1-1", port=2), "p1": HubPort(hub="1-1.4", port=1)}
    assert switched(tmp_path) == [  # the disk keeps its power
        "-l 1-1 -p 2 -a off", "-l 1-1 -p 2 -a on", "-l 1-1.4 -p 1 -a off", "-l 1-1.4 -p 1 -a on",
    ]  # fmt: skip
    assert "port 2 of hub 1-1: p0 went and came back" in told
    assert {status.state for status in pool.members()} == {MemberState.READY}

    told.clear()
    set_hubs({"1-1": hub(p2=port(first, second)), "1-2": hub("ganged", p1=port(second))})
    assert map_hub_ports(pool, adb_server, told.append) == {}
    assert "port 2 of hub 1-1: p0 and p1 went together: the hub is ganged" in told
    assert "hub 1-2: it switches all its ports together (ganged), so not p1" in told
    assert "p0 is on no port that was switched" in told

    told.clear()
    set_hubs({"1-1": hub(p1=port(said=f"18d1:4ee7 Pixel {first}"), p2=port(second, said="Pixel"))})
    mapper = HubMapper(adb_server, {first: "p0", second: "p1"}, told.append, gone_s=0.5)
    mapper.run(["1-1"])
    assert mapper.mapped == {"p1": HubPort(hub="1-1", port=2)}
    assert "port 1 of hub 1-1: p0 stayed: the hub does not cut the power" in told
    close(pool)


def test_only_a_device_that_is_free_loses_its_power(
    set_hubs: Hubs, phones: list[str], adb_server: AdbServer, tmp_path: Path
) -> None:
    first, second = phones
    set_hubs({"1-1": hub(p1=port(first), p2=port(second))})
    told: list[str] = []
    pool = make_pool(tmp_path, phones)
    with pool.acquire(Requirement(name="p0"), timeout_s=60, purpose="a night run") as lease:
        found = map_hub_ports(pool, adb_server, told.append)
        assert lease.device.shell(["echo", "here"]).stdout == "here\n"
        assert found == {"p1": HubPort(hub="1-1", port=2)}
        assert any("p0 is left out: " in line and "a night run" in line for line in told)
        assert not any("-p 1" in call for call in switched(tmp_path))
        with pytest.raises(PoolError, match=f"{first}.* might lose power"):
            map_hub_ports(pool, adb_server, told.append, locations=["1-1"])
    with pytest.raises(PoolError, match="there is no hub 9-9, but 1-1"):
        map_hub_ports(pool, adb_server, told.append, locations=["9-9"])
    set_hubs({"1-1": hub(p1=port(first) | {"fails": True})})
    with pytest.raises(PoolError, match="Permission denied"):
        map_hub_ports(pool, adb_server, told.append)
    set_hubs({})
    with pytest.raises(PoolError, match="No compatible devices"):
        map_hub_ports(pool, adb_server, told.append)
    close(pool)


def test_recovery_switches_the_port_of_the_device(
    set_hubs: Hubs, phones: list[str], adb_server: AdbServer, tmp_path: Path
) -> None:
    first, second = phones
    set_hubs({"1-1": hub(p1=port(first), p2=port(first))})
    text = "hubs: {p0: {hub: 1-1, port: 1}}\nrecovery: {steps: [power_cycle]}"
    pool = make_pool(tmp_path, [first], text)
    told: list[str] = []
    assert pool.admin.recover("p0", on_progress=told.append) is MemberState.READY
    cycle = HubPort(hub="1-1", port=2)
    cycle_power(cycle, first, [second], 30)
    assert switched(tmp_path) == ["-l 1-1 -p 2 -a cycle -d 5"]
    set_hubs({"1-1": hub(p2=port(second))})
    with pytest.raises(PoolError, match=f"port 2 of hub 1-1 has {second} now: .* tools.map_hub"):
        cycle_power(cycle, first, [second], 30)
    with pytest.raises(PoolError, match=r"there is no port 1 of hub 1-1: .* tools.map_hub"):
        cycle_power(HubPort(hub="1-1", port=1), first, [], 30)
    assert len(switched(tmp_path)) == 1
    close(pool)


def test_without_uhubctl_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PoolError, match="uhubctl cannot be run: No such file"):
        cycle_power(HubPort(hub="1-1", port=1), "x", [], 30)


REAL = """\
Current status for hub 2-1 [2109:0813 VIA Labs, Inc. USB3.0 Hub, USB 3.00, 4 ports, ppps]
  Port 1: 02a0 power 5gbps Rx.Detect
Current status for hub 1-1.4 [05e3:0610 GenesysLogic USB2.1 Hub, USB 2.10, 4 ports, ganged]
  Port 1: 0507 power highspeed suspend enable connect [18d1:4ee7 Google Pixel 9 R5CX12]
  Port 2: 0000 off
Current status for hub 1 [1d6b:0002 Linux 6.8 xhci-hcd xHCI, USB 2.00, 16 ports, nops]
noise
  Port 300: 0000 off
"""


def test_the_output_of_uhubctl_is_parsed() -> None:
    usb3, usb2, root = parse_hubs(REAL)
    assert (usb3.location, usb3.kind, usb2.kind, root.kind) == ("2-1", "ppps", "ganged", "nops")
    assert [(status.port.port, status.connected) for status in usb2.ports] == [
        (1, True),
        (2, False),
    ]
    assert usb2.ports[0].description.endswith("R5CX12")
    assert not usb3.ports[0].connected
    assert not root.ports
    assert parse_hubs("\x00" * 1000 + "Port 1: " * 10_000) == []


def test_a_person_maps_the_hubs_of_a_pool(
    set_hubs: Hubs, phones: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_hubs({"1-1.4": hub(p3=port(phones[0]))})
    path = tmp_path / "pool.yaml"
    path.write_text(f"devices: [{{name: alpha, type: android, identifier: '{phones[0]}'}}]\n")
    assert map_hub.main(["--pool", str(path)]) == 0
    said = capsys.readouterr()
    assert "port 3 of hub 1-1.4: alpha went and came back" in said.err
    assert parse_config(said.out).hubs == {"alpha": HubPort(hub="1-1.4", port=3)}
    set_hubs({"1-1.4": hub("ganged", p3=port(phones[0]))})
    assert map_hub.main(["--pool", str(path)]) == 1
    assert "ganged" in capsys.readouterr().err
    set_hubs({})
    assert map_hub.main(["--pool", str(path)]) == 2
