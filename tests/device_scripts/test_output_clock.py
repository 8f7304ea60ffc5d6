"""When the output of a command grew, by the shells and tools of phones."""

from pathlib import Path

from tests.device_scripts.conftest import DeviceShell


def test_it_tells_when_the_output_grew(device: DeviceShell, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("word\n")
    command = "read -r a; echo $a; sleep 0.4; echo next; sleep 0.4; printf end; exit 7"
    paths = [tmp_path / name for name in ("clock", "in", "out")]
    done = device.run("output_clock.sh", *paths, device.shell, "-c", command)
    assert (done.returncode, paths[2].read_text()) == (7, "word\nnext\nend")
    moments = [line.split() for line in paths[0].read_text().splitlines()]
    assert [int(size) for _, size in moments][-3:] == [5, 10, 13]
    assert moments[0][1] == "0"
    times = [float(time) for time, _ in moments]
    assert times == sorted(times)
    assert times[-1] - times[-3] > 0.3


def test_wrong_use_is_told(device: DeviceShell, tmp_path: Path) -> None:
    assert device.run("output_clock.sh", tmp_path / "clock").returncode == 2
    done = device.run("output_clock.sh", tmp_path / "no" / "clock", "/dev/null", "x", "true")
    assert done.returncode != 0
