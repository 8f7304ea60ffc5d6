import os
import re
import shlex
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from harness.pool.fence import LOST_STATUS, Fence
from harness.pool.owner import Owner
from tests.device_scripts.conftest import DeviceShell, processes_with
from tests.system import program
from tests.waiting import wait_for

if TYPE_CHECKING:
    from harness.devices.device import Device

HOLDER = 'a1-n {"label": "ann: pytest (pid 7)", "host": "lab1", "boot": "b\\u00e4"}'
OTHER = 'b2-n {"label": "ben: pytest (pid 8)", "host": "lab2"}'
_LINE = re.compile(r"qnnfarm-fence token=(\d+) id=([0-9a-f-]{36}) ended=(\d+) left=0\n")


def claim(
    device: DeviceShell,
    token: int,
    known: str = "",
    quiet: str = "",
    take: str | None = None,
    *,
    holder: str = HOLDER,
    ended: int | None = None,
) -> Fence:
    """Claim a device; its ledger granted all of its leases that are there."""
    ours = f"*-{holder.partition('-')[0]}-*"
    files = (path.name for path in (device.work_root / "fence").glob(ours))
    words = known, quiet, ",".join(files) if take is None else take
    done = device.run("fence.sh", device.work_root, "claim", str(token), holder, *words)
    match = _LINE.fullmatch(done.stdout)
    assert match, (done.stdout, done.stderr)
    assert (done.returncode, int(match[1])) == (0, token)
    assert int(match[3]) == ended or ended is None
    (ledger, _, grant), record = holder.partition(" ")[0].partition("-"), record_of(holder)
    of_lease = token, ledger, grant, record, str(device.work_root), match[2]
    return Fence("a", "a", cast("Device", None), *of_lease)


def record_of(holder: str) -> str:
    return holder.partition(" ")[2]


def tokens(device: DeviceShell) -> set[str]:
    files = (device.work_root / "fence").glob("[0-9]*")
    return {path.name.removesuffix("-a1-n") for path in files}


def guarded(device: DeviceShell, fence: Fence, command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [device.shell, "-c", fence.guarded(command)],
        env=device.environment | fence.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def test_the_fence_rises_and_never_falls(device: DeviceShell) -> None:
    first = claim(device, 7)
    assert claim(device, 7) == first
    second = claim(device, 100)
    assert second.id == first.id
    done = device.run("fence.sh", device.work_root, "claim", "99", HOLDER)
    assert (done.returncode, done.stdout) == (3, f"qnnfarm-fence refused=100 {record_of(HOLDER)}\n")
    assert tokens(device) == {"100"}


def test_commands_of_a_former_holder_do_not_run(device: DeviceShell, tmp_path: Path) -> None:
    old = claim(device, 1)
    written = tmp_path / "written"
    write = f"echo x >{shlex.quote(str(written))}; echo out; echo err >&2; exit 5"
    process = guarded(device, old, write)
    assert process.communicate() == ("out\n", "err\n")
    assert process.returncode == 5
    written.unlink()
    claim(device, 2)
    late = guarded(device, old, write)
    _, stderr = late.communicate()
    assert old.was_lost(late.returncode, stderr)
    assert not written.exists()


def test_a_command_is_the_callers_with_any_text_and_status(device: DeviceShell) -> None:
    fence = claim(device, 1)
    process = guarded(device, fence, f"exit {LOST_STATUS}")
    _, stderr = process.communicate()
    assert process.returncode == LOST_STATUS
    assert not fence.was_lost(process.returncode, stderr)
    # Hostile commands and their input arrive unchanged.
    process = guarded(
        device, fence, "cat; printf '<%s>' \"$QNNFARM_MARKS\" 'a'\\''b' '$(id)' \"`echo c`\""
    )
    stdout, _ = process.communicate("in 'put' $x\n")
    assert stdout == f"in 'put' $x\n<lease:{fence.id}.1-a1-n.><a'b><$(id)><c>"


def test_a_claim_kills_commands_that_passed_the_fence_before(
    device: DeviceShell, tmp_path: Path
) -> None:
    old = claim(device, 1)
    begun, late = tmp_path / "begun", tmp_path / "late"
    script = f": >{shlex.quote(str(begun))}; sleep 60; : >{shlex.quote(str(late))}"
    process = guarded(device, old, script)
    left = guarded(device, old, f"setsid sleep 61 >/dev/null 2>&1 & : >{shlex.quote(str(begun))}2")
    wait_for(begun.exists)
    wait_for((tmp_path / "begun2").exists)
    left.communicate()
    claim(device, 2)
    process.communicate(timeout=200)
    assert process.returncode == -9
    assert not late.exists()
    assert not running(old)


@pytest.mark.parametrize("between", [False, True])
def test_only_behind_a_quiet_lease_there_is_nothing_to_look_for(
    device: DeviceShell, *, between: bool
) -> None:
    quiet = claim(device, 1)
    stray = subprocess.Popen(
        [device.shell, "-c", "sleep 62; :"], env=device.environment | quiet.env
    )
    try:
        while not running(quiet):
            time.sleep(0.02)
        if between:  # somebody else had it meanwhile, and may have left something
            (device.work_root / "fence" / "2-a1-n").touch()
        claim(device, 3, quiet.id, "1-a1-n")
        assert bool(running(quiet)) is not between
        claim(device, 4, quiet.id, "1-a1-n")
        assert not running(quiet)
    finally:
        stray.kill()
        stray.wait()


def running(fence: Fence) -> list[int]:
    return processes_with(f"lease:{fence.id}.{fence.token}-{fence.ledger}-{fence.grant}.".encode())


def test_a_claim_ends_the_runs_of_a_former_holder(device: DeviceShell) -> None:
    old = claim(device, 1)
    run_dir = device.make_run("late")
    command = device.command("run.sh", run_dir, "60", "log", "--", "sh", "-c", "sleep 62")
    process = guarded(device, old, shlex.join(command))
    wait_for((run_dir / ".qnnfarm" / "process").exists)
    device.make_run("empty")
    claim(device, 2, ended=2)
    process.communicate(timeout=200)
    assert not run_dir.exists()
    assert not running(old)


def test_a_claim_removes_run_folders_that_were_never_finished(device: DeviceShell) -> None:
    first = claim(device, 1)
    runs = device.work_root / "runs"
    (runs / ".run-1.4242" / "lib").mkdir(parents=True)
    for link in (".link", "link"):
        (runs / link).symlink_to(device.work_root / "fence")
    done = device.run("fence.sh", device.work_root, "sweep", "1", HOLDER)
    assert done.returncode == 0
    assert (runs / ".run-1.4242").is_dir()  # it may be ours
    assert claim(device, 2).id == first.id
    assert {path.name for path in runs.iterdir()} == {".link", "link"}
    assert (device.work_root / "fence" / "id").exists()  # no link was followed


def test_the_processes_of_other_devices_on_the_same_kernel_live_on(
    device: DeviceShell, tmp_path: Path
) -> None:
    fence = claim(device, 5)
    process = guarded(
        device, fence, f": >{shlex.quote(str(tmp_path / 'begun'))}; read -r word; echo $word"
    )
    wait_for((tmp_path / "begun").exists)
    other = tmp_path / "other"
    (other / "runs").mkdir(parents=True)
    done = device.run("fence.sh", other, "claim", "9", HOLDER)
    assert done.returncode == 0
    assert process.communicate("alive\n", timeout=200) == ("alive\n", "")


def test_a_sweep_ends_what_the_holder_left(device: DeviceShell, tmp_path: Path) -> None:
    fence = claim(device, 3)
    process = guarded(device, fence, f": >{shlex.quote(str(tmp_path / 'begun'))}; sleep 63")
    wait_for((tmp_path / "begun").exists)
    done = device.run("fence.sh", device.work_root, "sweep", "3", HOLDER)
    assert (done.returncode, done.stderr) == (0, "")
    process.communicate(timeout=200)
    assert process.returncode == -9
    claim(device, 4)
    done = device.run("fence.sh", device.work_root, "sweep", "3", HOLDER)
    assert (done.returncode, done.stdout) == (3, f"qnnfarm-fence refused=4 {record_of(HOLDER)}\n")


def test_of_claims_at_the_same_time_the_greatest_stays(device: DeviceShell) -> None:
    asked = [11, 19, 12, 18, 13, 17]

    def one(token: int) -> "subprocess.CompletedProcess[str]":
        return device.run("fence.sh", device.work_root, "claim", str(token), HOLDER)

    with ThreadPoolExecutor(len(asked)) as threads:
        done = dict(zip(asked, threads.map(one, asked), strict=True))
    assert done[19].returncode == 0
    assert {each.returncode for each in done.values()} <= {0, 3}
    assert tokens(device) == {"19"}
    ids = {match[2] for each in done.values() if (match := _LINE.fullmatch(each.stdout))}
    assert ids == {(device.work_root / "fence" / "id").read_text().strip()}


def test_another_or_a_wiped_device_is_not_touched(device: DeviceShell) -> None:
    fence = claim(device, 1)
    assert claim(device, 2, fence.id).token == 2
    run_dir = device.make_run()
    done = device.run("fence.sh", device.work_root, "claim", "3", HOLDER, "0" * 36)
    assert (done.returncode, done.stdout) == (4, "qnnfarm-fence other\n")
    assert run_dir.exists()
    wiped = device.work_root.parent / "wiped"
    done = device.run("fence.sh", wiped, "claim", "3", HOLDER, fence.id)
    assert (done.returncode, done.stdout) == (4, "qnnfarm-fence other\n")
    assert not wiped.exists()


def refused(device: DeviceShell, token: int, *words: str) -> tuple[int, str]:
    done = device.run("fence.sh", device.work_root, "claim", str(token), OTHER, *words)
    return done.returncode, done.stdout


def test_a_holder_of_another_ledger_keeps_the_device(device: DeviceShell) -> None:
    claim(device, 5)
    run_dir = device.make_run()
    held = (5, f"qnnfarm-fence held=5-a1-n {record_of(HOLDER)}\n")
    assert refused(device, 3) == refused(device, 5) == refused(device, 9) == held
    assert refused(device, 9, "", "0", "4-a1-n") == held
    assert run_dir.exists()
    assert tokens(device) == {"5"}


def test_a_holder_of_another_ledger_gives_way_to_who_names_it(device: DeviceShell) -> None:
    old = claim(device, 5)
    process = subprocess.Popen(
        [device.shell, "-c", "sleep 65; :"], env=device.environment | old.env
    )
    new = claim(device, 5, "", "0", "5-a1-n", holder=OTHER)
    assert process.wait(200) == -9
    late = guarded(device, old, "true")
    _, stderr = late.communicate()
    assert old.was_lost(late.returncode, stderr)
    assert guarded(device, new, "echo here").communicate() == ("here\n", "")


COPY = 'a1-m {"label": "ann: pytest (pid 9)", "host": "lab1"}'


def test_a_holder_of_a_copy_of_the_ledger_keeps_the_device(device: DeviceShell) -> None:
    """Neither its token nor a higher one of the same ledger takes what that did not grant."""
    claim(device, 5)

    def asks(token: int, take: str = "") -> tuple[int, str]:
        words = ("claim", str(token), COPY, "", "", take)
        done = device.run("fence.sh", device.work_root, *words)
        return done.returncode, done.stdout

    refused = (3, f"qnnfarm-fence refused=5 {record_of(HOLDER)}\n")
    held = (5, f"qnnfarm-fence held=5-a1-n {record_of(HOLDER)}\n")
    assert asks(4) == asks(5) == asks(5, "5-a1-n") == refused
    assert asks(6) == asks(6, "4-a1-n,5-a1-m") == held
    assert tokens(device) == {"5"}
    (device.work_root / "fence" / "5-a1-n").write_text("- {}\n")
    assert asks(5) == (3, "qnnfarm-fence refused=5 {}\n"), "its late command would run"
    assert asks(6)[0] == 0


@pytest.mark.parametrize("name", ["999999999-a1-x", "1000014-a1"])
def test_a_token_that_no_grant_explains_stops_nobody(device: DeviceShell, name: str) -> None:
    first = claim(device, 7)
    (device.work_root / "fence" / name).write_text("a1-x {}\n")
    assert claim(device, 8).id == first.id
    assert tokens(device) == {"8"}


@pytest.mark.needs("namespaces")
def test_a_disk_that_is_full_leaves_no_file_in_the_fence(device: DeviceShell) -> None:
    fence = claim(device, 5)
    words = device.command("fence.sh", device.work_root, "claim", "6", HOLDER)
    script = (
        f'mount -t tmpfs -o size=1M none "$1" && cp -a "$1".old/. "$1"; shift; '
        f'head -c 9000000 /dev/zero >{shlex.quote(str(device.work_root))}/rest 2>/dev/null; "$@"; '
        f"echo $? $(ls {shlex.quote(str(device.work_root))}/fence)"
    )
    shutil.copytree(device.work_root, f"{device.work_root}.old", symlinks=True)
    done = subprocess.run(
        [str(program("unshare")), "--mount", "sh", "-c", script, "sh", device.work_root, *words],
        env=device.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "the file system is full or read-only" in done.stderr
    assert done.stdout.split() == ["1", "5-a1-n", "id"]
    assert claim(device, 6).id == fence.id


def test_a_device_that_was_given_back_goes_to_any_ledger(device: DeviceShell) -> None:
    fence = claim(device, 5)
    commands: list[str] = []

    class Shell:
        def shell(self, command: str, **_: object) -> None:
            commands.append(command)

    replace(fence, device=cast("Device", Shell())).give_back()
    subprocess.run([device.shell, "-c", commands[0]], env=device.environment, check=True)
    assert claim(device, 2, holder=OTHER).token == 2
    late = subprocess.run([device.shell, "-c", commands[0]], env=device.environment, check=True)
    assert (late.returncode, tokens(device)) == (0, {"2-b2-n"})


def test_a_late_command_says_who_has_the_device(device: DeviceShell) -> None:
    old = claim(device, 1)
    claim(device, 2, "", "0", "1-a1-n", holder=OTHER)
    process = guarded(device, old, "true")
    _, stderr = process.communicate()
    assert old.was_lost(process.returncode, stderr)
    told = old.describe_loss(stderr, time.time())
    assert re.fullmatch(
        r"ben: pytest \(pid 8\) on lab2, since .*, has the device through another ledger", told
    )
    shutil.rmtree(device.work_root)
    process = guarded(device, old, "true")
    _, stderr = process.communicate()
    assert "its fence on the device is gone" in old.describe_loss(stderr, time.time())


@pytest.mark.parametrize(
    "record",
    ["", "{", "[" * 1999, '{"label": 3}', '{"pid": -1}', '{"label": "' + "x" * 300 + '"}', "null"],
)
def test_a_record_that_cannot_be_read_is_nobody_known(record: str) -> None:
    assert str(Owner.parse(record)) == "a holder that is not known"


def test_the_holder_that_a_device_names_is_one_line() -> None:
    told = Owner.parse('{"label": "a\\u001b[31m\\nb", "host": "h\\u0007"}')
    assert str(told) == "a [31m b on h"


def test_a_half_written_id_is_written_anew(device: DeviceShell) -> None:
    (device.work_root / "fence").mkdir()
    (device.work_root / "fence" / "id").write_text("0123")
    assert len(claim(device, 1).id) == 36


def test_a_work_root_that_cannot_be_written(device: DeviceShell) -> None:
    if os.geteuid() == 0:
        root = device.work_root.parent / "file"
        root.touch()
    else:
        root = device.work_root
        root.chmod(0o500)
    done = device.run("fence.sh", root, "claim", "1", HOLDER)
    assert done.returncode == 1
    assert "cannot make the folder" in done.stderr
