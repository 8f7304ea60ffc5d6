"""Files to and from a device, through the real adb."""

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import adbutils

from plugins.virtual_android import manager
from plugins.virtual_android.manager import VirtualDevice
from tests.plugins.virtual_android.helpers import Adb
from tests.waiting import wait_for

_TMP = "/data/local/tmp"


def test_folders_with_all_kinds_of_names(on_device: Adb, tmp_path: Path) -> None:
    source = tmp_path / "sour ce"
    names = ["plain", "with space", 'it\'s "quoted"', "späße-漢字-🙂", "$HOME;`id`", "-dash", "a,b"]
    for name in names:
        (source / name).mkdir(parents=True)
        (source / name / f"{name}.txt").write_text(name)
    (source / "empty").mkdir()
    assert on_device("push", source, f"{_TMP}/folder").returncode == 0
    assert on_device("shell", "ls $TMPDIR/folder").stdout.count(b"\n") >= len(names)
    assert on_device("pull", f"{_TMP}/folder", tmp_path / "back").returncode == 0
    for name in names:
        assert (tmp_path / "back" / name / f"{name}.txt").read_text() == name
    again = on_device("push", "--sync", source, f"{_TMP}/folder")
    assert again.returncode == 0
    assert on_device("shell", "rm -r $TMPDIR/folder").returncode == 0


def test_modes_and_mtimes_are_kept(on_device: Adb, tmp_path: Path) -> None:
    for mode in (0o644, 0o755, 0o600, 0o444, 0o711):
        local = tmp_path / f"{mode:o}"
        local.write_text("x")
        local.chmod(mode)
        os.utime(local, (1_234_567_890 + mode,) * 2)
        assert on_device("push", local, f"{_TMP}/{mode:o}").returncode == 0
        output = on_device("shell", f"stat -c '%a %Y' $TMPDIR/{mode:o}").stdout.decode().split()
        assert output == [f"{mode:o}", str(1_234_567_890 + mode)]
        back = tmp_path / f"back{mode:o}"
        assert on_device("pull", "-a", f"{_TMP}/{mode:o}", back).returncode == 0
        assert stat.S_IMODE(back.stat().st_mode) == mode
        assert int(back.stat().st_mtime) == 1_234_567_890 + mode


def test_push_pull_and_shell_see_one_folder(device: VirtualDevice, on_device: Adb) -> None:
    on_device("shell", "echo seen >$TMPDIR/by-shell")
    assert b"by-shell" in on_device("ls", _TMP).stdout
    assert (device.root / "data/local/tmp/by-shell").read_text() == "seen\n"
    in_namespace = device.namespace != "none"
    shown = on_device("shell", "echo $TMPDIR").stdout.decode().strip()
    assert (shown == _TMP) is in_namespace
    if in_namespace:
        assert on_device("shell", f"cat {_TMP}/by-shell").stdout == b"seen\n"
    else:
        assert shown == str(device.root / "data/local/tmp")
        assert on_device("ls", shown).stdout == on_device("ls", _TMP).stdout


def test_a_file_is_replaced_whole_and_links_are_followed(on_device: Adb, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("one")
    (tmp_path / "two").write_text("two")
    on_device("push", tmp_path / "one", f"{_TMP}/target")
    on_device("shell", "cd $TMPDIR && ln -sf target link && exec 3<target && sleep 0")
    assert on_device("push", tmp_path / "two", f"{_TMP}/link").returncode == 0
    output = on_device("shell", "cd $TMPDIR && readlink link && cat target")
    assert output.stdout == b"target\ntwo"


def test_the_first_version_of_the_protocol(device: VirtualDevice, tmp_path: Path) -> None:
    port = int(os.environ["ADB_SERVER_SOCKET"].rpartition(":")[2])
    client = adbutils.AdbClient(host="127.0.0.1", port=port).device(device.serial)
    data = os.urandom(200_000)
    client.sync.push(data, f"{_TMP}/v1/ä b", mode=0o640, check=True)
    assert client.sync.read_bytes(f"{_TMP}/v1/ä b") == data
    found = client.sync.stat(f"{_TMP}/v1/ä b")
    assert (found.size, stat.S_IMODE(found.mode)) == (len(data), 0o640)
    assert [entry.path for entry in client.sync.list(f"{_TMP}/v1") if "b" in entry.path] == ["ä b"]
    assert not client.sync.exists(f"{_TMP}/v1/none")
    assert client.shell2("echo hi", v2=True).output == "hi\n"


def test_a_full_device_says_so_and_keeps_nothing_partial(
    start_device: Callable[..., VirtualDevice], adb: Adb, tmp_path: Path
) -> None:
    device = start_device("full", storage_bytes=2_000_000)

    def on_full(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
        return adb("-s", device.serial, *arguments)

    (tmp_path / "small").write_bytes(bytes(500_000))
    (tmp_path / "large").write_bytes(bytes(3_000_000))
    assert on_full("push", tmp_path / "small", f"{_TMP}/small").returncode == 0
    pushed = on_full("push", tmp_path / "large", f"{_TMP}/large")
    assert pushed.returncode != 0
    assert b"No space left on device" in pushed.stderr + pushed.stdout
    assert on_full("shell", "ls -A $TMPDIR").stdout == b"small\n"
    free = int(on_full("shell", "df -k /data/local/tmp | tail -n 1").stdout.split()[3])
    assert 1000 < free < 1500
    for _ in range(5):  # what a shell forks first must be limited too
        forked = "head -c 5000000 /dev/zero >$TMPDIR/by-shell & wait $!"
        assert on_full("shell", forked).returncode != 0
    on_full("shell", "rm $TMPDIR/*")
    assert on_full("push", tmp_path / "small", f"{_TMP}/again").returncode == 0
    manager.remove("full")


def test_a_device_that_goes_away_during_a_push(
    start_device: Callable[..., VirtualDevice], tmp_path: Path
) -> None:
    device = start_device("leaves")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(20_000_000_000)
    client = subprocess.Popen(
        [adbutils.adb_path(), "-s", device.serial, "push", str(tmp_path / "huge"), f"{_TMP}/huge"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    folder = device.root / "data/local/tmp"
    wait_for(lambda: any(file.stat().st_size > 1_000_000 for file in folder.iterdir()))
    manager.stop("leaves")
    output, _ = client.communicate(timeout=200)
    assert client.returncode != 0, output
    assert list(folder.iterdir()) == []
    manager.remove("leaves")
