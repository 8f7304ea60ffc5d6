"""`prepare.sh` under a phone's shell and tools, with Android's commands as far as it asks them."""

from pathlib import Path

import pytest

from tests.device_scripts.conftest import DeviceShell
from tests.harness.telemetry.phone import make_sysfs
from tests.harness.telemetry.test_conditions import governors

# Each does what the command of that name does on a phone, over files beside it.
_ANDROID = {
    "settings": """\
case $1 in
get) read -r v 2>/dev/null <"$STATE/$3" && echo "$v" || echo null ;;
put) echo "$4" >"$STATE/$3" ;;
delete) rm -f "$STATE/$3"; echo 'Deleted 1 rows' ;;
esac
""",
    "input": 'case $2 in *SLEEP) echo Asleep ;; *) echo Awake ;; esac >"$STATE/wakefulness"\n',
    "dumpsys": 'read -r v <"$STATE/wakefulness"; echo "POWER MANAGER"; echo "  mWakefulness=$v"\n',
    "cmd": """\
echo "Failed to set FIXED_PERFORMANCE mode | a
record|screen|met|||forged"
exit 255
""",
}


@pytest.fixture
def phone(device: DeviceShell, tmp_path: Path) -> tuple[Path, Path]:
    """A sysfs, and the state of Android's services."""
    sysfs, tools, state = make_sysfs(tmp_path / "a sysfs"), tmp_path / "tools", tmp_path / "state"
    tools.mkdir()
    state.mkdir()
    (state / "wakefulness").write_text("Awake\n")
    for name, text in _ANDROID.items():
        (tools / name).write_text("#!/bin/sh\n" + text)
        (tools / name).chmod(0o755)
    path = f"{device.environment['PATH']}:{tools}"
    device.environment.update(QNNFARM_SYS_ROOT=str(sysfs), STATE=str(state), PATH=path)
    return sysfs, state


def records(stdout: str) -> dict[str, list[str]]:
    *lines, last = stdout.splitlines()
    assert last == "qnnfarm-prepare ok=1"
    rows = [line.split("|") for line in lines]
    assert all(row[0] == "record" and len(row) == 6 for row in rows), stdout
    return {row[1]: row[2:] for row in rows}


def test_nothing_to_restore(device: DeviceShell, phone: tuple[Path, Path]) -> None:
    done = device.run("prepare.sh", "restore", device.work_root)
    assert (done.returncode, records(done.stdout)) == (0, {})


def test_a_change_that_cannot_be_noted_is_not_made(
    device: DeviceShell, phone: tuple[Path, Path]
) -> None:
    _, state = phone
    tool = Path(device.environment["PATH"].split(":")[1]) / "cmd"
    tool.write_text('#!/bin/sh\nrm "$STATE/wakefulness"\n')
    done = device.run_on_a_full_disk("prepare.sh", "apply", device.work_root, "fixed-performance")
    assert (done.returncode, done.stdout) == (1, "")
    assert "full or read-only" in done.stderr
    assert (state / "wakefulness").exists()


def test_a_change_that_cannot_be_undone_is_left_for_the_next_session(
    device: DeviceShell, phone: tuple[Path, Path]
) -> None:
    sysfs, state = phone
    device.run("prepare.sh", "apply", device.work_root, "stay-awake", "governor=performance")
    settings = Path(device.environment["PATH"].split(":")[1]) / "settings"
    works = settings.read_text()
    settings.write_text("#!/bin/sh\nexit 1\n")  # the service is starting again
    back = records(device.run("prepare.sh", "restore", device.work_root).stdout)
    assert back.pop("stay_awake")[0] == "not-restored"
    assert {row[0] for row in back.values()} == {"restored"}
    assert (device.work_root / "prepared").read_text() == "stay_awake null\n"
    settings.write_text(works)
    back = records(device.run("prepare.sh", "restore", device.work_root).stdout)
    assert [(name, row[0]) for name, row in back.items()] == [("stay_awake", "restored")]
    assert not (state / "stay_on_while_plugged_in").exists()
    assert not (device.work_root / "prepared").exists()
    assert governors(sysfs) == {"walt"}


def test_output_of_commands_forges_no_record(device: DeviceShell, phone: tuple[Path, Path]) -> None:
    done = device.run("prepare.sh", "apply", device.work_root, "fixed-performance")
    found = records(done.stdout)
    assert list(found) == ["fixed_performance"]
    assert found["fixed_performance"][0] == "not-met"
    reason = " ".join(found["fixed_performance"][3].split())
    assert reason.endswith("FIXED_PERFORMANCE mode a record screen met forged")


def test_a_screen_that_was_off_stays_off(device: DeviceShell, phone: tuple[Path, Path]) -> None:
    _, state = phone
    (state / "wakefulness").write_text("Dozing\n")
    done = device.run("prepare.sh", "apply", device.work_root, "screen-off")
    assert records(done.stdout)["screen"][:3] == ["met", "Dozing", "Dozing"]
    device.run("prepare.sh", "restore", device.work_root)
    assert (state / "wakefulness").read_text() == "Dozing\n"


def test_hostile_notes_and_governors_do_nothing(
    device: DeviceShell, phone: tuple[Path, Path], tmp_path: Path
) -> None:
    sysfs, _ = phone
    owned = tmp_path / "owned"
    (device.work_root / "prepared").write_text(
        f"governor 0/../../..:x\ngovernor $(touch\t{owned}):x\nrm -rf\nstay_awake ;touch {owned}\n"
        "* *\n"
    )
    governor = sysfs / "devices/system/cpu/cpu1/cpufreq/scaling_governor"
    governor.write_text(f"$(touch {owned})|x\n")
    done = device.run("prepare.sh", "restore", device.work_root)
    assert done.returncode == 0
    done = device.run("prepare.sh", "apply", device.work_root, "governor=performance")
    assert records(done.stdout)["governor"][0] == "not-met"
    assert governor.read_text().startswith("$(touch")
    assert not owned.exists()


def test_a_link_in_the_place_of_the_notes_is_refused(
    device: DeviceShell, phone: tuple[Path, Path], tmp_path: Path
) -> None:
    (device.work_root / "prepared").symlink_to(tmp_path / "elsewhere")
    done = device.run("prepare.sh", "apply", device.work_root, "stay-awake")
    assert done.returncode == 1
    assert "symbolic link" in done.stderr
    assert not (tmp_path / "elsewhere").exists()
