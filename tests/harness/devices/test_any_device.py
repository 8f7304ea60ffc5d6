"""What every type of device does alike: the Protocol, on real ones."""

import os
import socket
import threading
from pathlib import Path

import pytest

from harness.devices.base import PullItem, PushItem
from harness.devices.device import Device
from harness.errors import (
    DeviceCommandError,
    DeviceTimeoutError,
    DeviceTransferError,
    HostFileError,
)
from tests.device_echo import echo_on
from tests.waiting import wait_for

_HOSTILE = 'it\'s "a" $(name) `of` -ü\u202e 漢字,0644'


def _lives(device: Device, pid: int) -> bool:
    """Return whether a process runs there; a zombie has no command line."""
    return device.shell(f"grep -q . /proc/{pid}/cmdline", check=False).exit_status == 0


def _wait_until_gone(device: Device, *pids: int) -> None:
    wait_for(lambda: not any(_lives(device, pid) for pid in pids))


_FAMILY = """\
trap '' HUP
sh -c 'trap "" HUP; echo $$; exec sleep 3600' &
setsid sh -c 'trap "" HUP; echo $$; exec sleep 3600' &
wait
"""


class _Family:
    """The output of a script whose two descendants stay, whatever hangs up; calls `then` once."""

    def __init__(self, then: object = None) -> None:
        self.text = ""
        self._then = then

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self.text.split()]

    def __call__(self, data: bytes) -> None:
        self.text += data.decode()
        if self.text.count("\n") == 2 and callable(self._then):
            self._then()


def test_it_says_what_it_is(any_device: Device) -> None:
    assert any_device.type in {"android", "linux", "local"}
    found = any_device.properties()
    assert found.serial == any_device.serial
    assert found.emulator  # these tests run on no Snapdragon
    assert found.abi
    assert found.system
    assert found.hardware_serial
    assert found.free_bytes is not None
    assert found.free_bytes > 1 << 20
    free = any_device.free_bytes()
    assert free is not None
    assert any_device.boot_id() == any_device.boot_id()


def test_streams_status_and_input(any_device: Device) -> None:
    result = any_device.shell("cat; echo err >&2; exit 7", stdin=b"in\n", check=False)
    assert (result.exit_status, result.stdout, result.stderr) == (7, "in\n", "err\n")
    data = b"0123456789abcdef" * 100_000
    assert any_device.shell("cat", stdin=data, timeout_s=60).stdout.encode() == data
    cut = any_device.shell("cat", stdin=data, timeout_s=60, max_output=100).stdout
    assert f"{len(data) - 100} bytes left out" in cut
    assert any_device.shell("head -c 1", stdin=data).stdout == "0"


def test_what_a_command_writes_is_all_that_comes(any_device: Device) -> None:
    assert any_device.shell("true") == any_device.shell(":")
    assert any_device.shell("true").stdout == ""
    assert any_device.shell("printf x").stdout == "x"
    assert any_device.shell("if", check=False).exit_status != 0
    assert "qnnfarm-job" not in any_device.shell("if", check=False).stdout


def test_a_death_by_a_signal_is_its_number(any_device: Device) -> None:
    result = any_device.shell("kill -9 $$", check=False)
    assert result.exit_status == 137
    result = any_device.shell(["sh", "-c", "kill -11 $$"], check=False)
    assert result.exit_status == 139


def test_a_failure_carries_everything(any_device: Device) -> None:
    with pytest.raises(DeviceCommandError, match="status 3: broken") as caught:
        any_device.shell("echo noise; echo broken >&2; exit 3")
    error = caught.value
    assert (error.serial, error.exit_status) == (any_device.serial, 3)
    assert error.log_tail == "broken\n"
    assert "exit 3" in error.command


def test_output_comes_as_it_is_written(any_device: Device) -> None:
    seen = bytearray()
    first = threading.Event()

    def take(data: bytes) -> None:
        seen.extend(data)
        first.set()

    gate = f"{any_device.work_root}/gate"
    any_device.shell(["mkdir", "-p", any_device.work_root])
    any_device.shell(["rm", "-f", gate])
    script = f"echo out; echo err >&2; while [ ! -e {gate} ]; do sleep 0.05; done; exit 5"
    results = []
    thread = threading.Thread(
        target=lambda: results.append(any_device.stream(script, on_output=take, timeout_s=60))
    )
    thread.start()
    first.wait()  # it has not ended: it waits for us
    any_device.shell(["touch", gate])
    thread.join()
    assert sorted(seen.decode().split()) == ["err", "out"]
    assert (results[0].exit_status, results[0].stdout, results[0].stderr) == (5, "out\n", "err\n")


_TIMES_S = (0.5, 4, 32, 256)
"""As long as the machine takes to begin within them."""


def test_a_timeout_kills_all_of_it(any_device: Device) -> None:
    for timeout_s in _TIMES_S:
        family = _Family()
        with pytest.raises(DeviceTimeoutError, match=rf" {timeout_s:g} s"):
            any_device.stream(_FAMILY, on_output=family, timeout_s=timeout_s)
        _wait_until_gone(any_device, *family.pids)
        if len(family.pids) == 2:
            return
    pytest.fail("it never began")


def test_whatever_ends_it_kills_all_of_it(any_device: Device) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    family = _Family(fail)
    with pytest.raises(KeyboardInterrupt):
        any_device.stream(_FAMILY, on_output=family, timeout_s=60)
    _wait_until_gone(any_device, *family.pids)


def test_what_ends_well_may_leave_something_running(any_device: Device) -> None:
    pid = int(any_device.shell("sleep 3600 >/dev/null 2>&1 & echo $!").stdout)
    assert _lives(any_device, pid)
    any_device.shell(["kill", "-9", str(pid)])


def test_what_is_left_with_the_output_open_holds_nobody(
    any_device: Device, any_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = any_device.shell("echo out; echo err >&2; sleep 3600 & echo $!; exit 0", timeout_s=300)
    first, pid = result.stdout.split()
    assert (first, result.stderr, result.left) == ("out", "err\n", (f"{pid} sleep 3600",))
    assert _lives(any_device, int(pid))
    any_device.shell(["kill", "-9", pid])
    left = f"(echo failed >&2; exec sleep 3600) & echo $! >{any_folder}/pid"
    with pytest.raises(DeviceCommandError, match="status 3: failed"):
        any_device.shell(f"{left}; sleep 0.5; exit 3", timeout_s=300)
    any_device.shell(f"kill -9 $(cat {any_folder}/pid)")
    monkeypatch.setattr("harness.devices.device._HELD_S", 200.0)  # however slow the machine is
    assert any_device.shell("(sleep 0.05; echo late) & echo early", timeout_s=300).left == ()


@pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_001])  # 64 KiB is a chunk of adb's sync
def test_files_there_and_back(
    any_device: Device, any_folder: str, local_folder: Path, size: int
) -> None:
    local = local_folder / "file"
    local.write_bytes(os.urandom(size))
    local.chmod(0o755)
    os.utime(local, (1_600_000_000, 1_600_000_000))
    remote = f"{any_folder}/sub/a b/{_HOSTILE}"
    sent: list[int] = []
    assert any_device.push(local, remote, on_progress=sent.append) == size
    assert sum(sent) == size
    status = any_device.shell(["stat", "-c", "%a %s %Y", remote]).stdout.strip()
    assert status == f"755 {size} 1600000000"
    assert any_device.shell(["ls", "-A", f"{any_folder}/sub/a b"]).stdout == f"{_HOSTILE}\n"
    back = local_folder / "back"
    got: list[int] = []
    assert any_device.pull(remote, back, on_progress=got.append) == size
    assert sum(got) == size
    assert back.read_bytes() == local.read_bytes()


def test_a_push_replaces_and_sets_the_mode(
    any_device: Device, any_folder: str, local_folder: Path
) -> None:
    local = local_folder / "file"
    for text, mode in (("longer than the other", 0o600), ("short", 0o640)):
        local.write_text(text)
        any_device.push(local, f"{any_folder}/file", mode=mode)
        assert any_device.shell(["cat", f"{any_folder}/file"]).stdout == text
        said = any_device.shell(["stat", "-c", "%a", f"{any_folder}/file"]).stdout.strip()
        assert said == f"{mode:o}"


def test_many_files_in_one_go_and_back(
    any_device: Device, any_folder: str, local_folder: Path
) -> None:
    """More than are asked for ahead, with one of several packets among them."""
    sizes = [number * (3000 if number == 40 else 1) for number in range(100)]
    there = [
        PushItem(local_folder / f"{n}", f"{any_folder}/{n % 3}/{n}") for n in range(len(sizes))
    ]
    for item, size in zip(there, sizes, strict=True):
        item.local.write_bytes(b"x" * size)
    assert any_device.push_many(there) == sum(sizes)
    items = [PullItem(item.remote, local_folder / f"back-{n}") for n, item in enumerate(there)]
    got: list[int] = []
    assert any_device.pull_many(items, on_progress=got.append) == sum(sizes) == sum(got)
    assert [item.local.stat().st_size for item in items] == sizes
    assert any_device.pull_many([]) == 0
    items[70] = PullItem(f"{any_folder}/absent", local_folder / "absent")
    with pytest.raises(DeviceTransferError) as caught:
        any_device.pull_many(items)
    assert caught.value.path == items[70].remote
    assert not items[70].local.exists()
    assert not list(local_folder.glob(".*"))


def test_impossible_transfers_are_refused(
    any_device: Device, any_folder: str, local_folder: Path
) -> None:
    local = local_folder / "file"
    local.write_bytes(b"x" * 100_000)
    any_device.shell(["touch", f"{any_folder}/plain"])
    for remote in (any_folder, f"{any_folder}/plain/below"):
        with pytest.raises(DeviceTransferError) as caught:
            any_device.push(local, remote)
        assert caught.value.path == remote
    back = local_folder / "back"
    with pytest.raises(DeviceTransferError):
        any_device.pull(f"{any_folder}/absent", back)
    for missing, said in (("absent", "No such file"), ("", "not a regular file")):
        with pytest.raises(HostFileError, match=said):
            any_device.push(local_folder / missing, f"{any_folder}/x")
    assert list(local_folder.iterdir()) == [local]
    assert any_device.shell(["ls", "-A", any_folder]).stdout == "plain\n"


def test_a_pull_that_takes_too_long_leaves_nothing(
    any_device: Device, any_folder: str, local_folder: Path
) -> None:
    any_device.shell(["truncate", "-s", "64G", f"{any_folder}/endless"])
    with pytest.raises(DeviceTimeoutError):
        any_device.pull(f"{any_folder}/endless", local_folder / "back", timeout_s=0.3)
    assert list(local_folder.iterdir()) == []
    any_device.shell(["rm", f"{any_folder}/endless"])


def test_a_port_of_the_device(any_device: Device) -> None:
    data = os.urandom(2_000_000)
    with (
        echo_on(any_device) as port,
        any_device.forward(f"tcp:{port}") as address,
        socket.create_connection(address, 120) as link,
    ):
        threading.Thread(target=link.sendall, args=(data,)).start()
        assert link.makefile("rb").read(len(data)) == data
    for remote in ("tcp:0", "tcp:70000", "tcp:1;tcp:2", "localabstract:x", f"tcp:{port}\n"):
        with pytest.raises(ValueError, match="is not tcp:PORT"), any_device.forward(remote):
            pass
