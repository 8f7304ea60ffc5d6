import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from harness.deploy.store import DISK_FULL
from tests.device_scripts.conftest import DeviceShell, marked_processes
from tests.waiting import is_alive, wait_for

_LINE = re.compile(
    r"qnnfarm-run exit=(\d+) signal=(\d+) timed_out=([01]) peak_rss_kb=(\d+)"
    r" peak_anon_kb=\d+ peak_file_kb=\d+ elapsed_ms=(\d+) reason=([A-Za-z-]+) leftover=(\d+)"
)


def outcome(stdout: str) -> tuple[str, ...]:
    match = _LINE.fullmatch(stdout.rstrip("\n").split("\n")[-1])
    assert match, stdout
    return match.groups()


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def test_environment_folder_and_arguments_arrive_unchanged(device: DeviceShell) -> None:
    run_dir = device.make_run()
    hostile = ["a b", "q\"uo'te", "$(touch owned)", "`id`", "*", "-n", "", "line\nbreak", "日本\\"]
    script = 'pwd; echo "$LD_LIBRARY_PATH|$ADSP_LIBRARY_PATH|${PATH%%:*}"; printf "<%s>" "$@"'
    done = device.run("run.sh", run_dir, "20", "log", "--", "sh", "-c", script, "sh", *hostile)
    assert done.returncode == 0, done.stderr
    assert outcome(done.stdout)[:3] == ("0", "0", "0")
    expected = f"{run_dir}\n{run_dir}|{run_dir}|{run_dir}\n" + "".join(f"<{a}>" for a in hostile)
    assert (run_dir / "log").read_text() == expected
    assert not (run_dir / "owned").exists()
    assert (run_dir / ".qnnfarm/result").read_text().strip() == done.stdout.strip()


def test_a_full_device_is_told_and_the_next_run_works(device: DeviceShell) -> None:
    run_dir = device.make_run()
    arguments = ("run.sh", run_dir, "20", "log", "--", "true")
    full = device.run_on_a_full_disk(*arguments)
    assert (full.returncode, full.stdout) == (125, "")
    assert full.stderr == f"error: cannot write to {run_dir}: {DISK_FULL}\n"
    assert device.run(*arguments).returncode == 0


def test_stdout_can_have_a_file_of_its_own(device: DeviceShell) -> None:
    run_dir = device.make_run()
    command = ["--", "sh", "-c", "echo text; echo message >&2"]
    done = device.run("run.sh", "-o", "text file", run_dir, "20", "log", *command)
    assert done.returncode == 0
    assert (run_dir / "text file").read_text() == "text\n"
    assert (run_dir / "log").read_text() == "message\n"


@pytest.mark.parametrize(
    ("script", "status", "signal_number"),
    [("exit 7", 7, 0), ("kill -SEGV $$", 139, 11), ("exec /nonexistent", 127, 0)],
)
def test_the_end_of_the_command_is_told(
    device: DeviceShell, script: str, status: int, signal_number: int
) -> None:
    done = device.run("run.sh", device.make_run(), "20", "log", "--", "sh", "-c", script)
    assert done.returncode == status
    assert outcome(done.stdout)[:2] == (str(status), str(signal_number))


def test_a_hung_command_that_ignores_term_is_killed_with_its_children(device: DeviceShell) -> None:
    run_dir = device.make_run()
    escaped = """(setsid sh -c 'trap "" TERM; sleep 301' &)"""
    script = f"trap '' TERM HUP INT; sleep 300 & {escaped}; sleep 302; wait"
    began = time.monotonic()
    done = device.run("run.sh", run_dir, "1", "log", "--", "sh", "-c", script)
    assert done.returncode == 124
    exit_status, signal_number, timed_out, _, elapsed, reason, leftover = outcome(done.stdout)
    assert (exit_status, signal_number, timed_out) == ("137", "9", "1")
    assert (reason, leftover) == ("timeout", "0")
    # In steps of 10 ms, at both ends.
    assert 1000 <= int(elapsed) <= (time.monotonic() - began) * 1000 + 20
    assert marked_processes(run_dir) == []


def test_a_long_command_is_told_of_with_its_own_words(device: DeviceShell) -> None:
    run_dir = device.make_run()
    wait = "until [ -e over ]; do sleep 0.1; done"
    process = device.start("run.sh", "-t", "1", run_dir, "200", "log", "--", "sh", "-c", wait)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert re.fullmatch(r"qnnfarm-running elapsed_s=\d+ \n", first), first
    (run_dir / ".qnnfarm/progress").write_text("window 2/8\n")
    while not (line := process.stdout.readline()).endswith(" window 2/8\n"):
        assert line.startswith("qnnfarm-running ")
    (run_dir / "over").touch()
    stdout, _ = process.communicate()
    assert process.returncode == 0
    assert outcome(stdout)[5] == "exited"
    assert not (run_dir / ".qnnfarm" / "progress").exists()


@pytest.mark.parametrize("words", [("name",), ("-o", "name", "log")])
def test_a_log_does_not_take_the_place_of_a_content(
    device: DeviceShell, words: tuple[str, ...]
) -> None:
    content = device.work_root / "store" / ("0" * 64)
    content.write_text("content")
    run_dir = device.make_run()
    (run_dir / "name").symlink_to(content)
    *option, log = words
    done = device.run("run.sh", *option, run_dir, "20", log, "--", "echo", "text")
    assert (done.returncode, content.read_text()) == (125, "content")
    assert "name of a file of the run" in done.stderr


@pytest.mark.parametrize("old_grep", [False, True])
def test_a_daemon_that_left_session_and_parents_is_killed_at_the_end(
    device: DeviceShell, old_grep: bool
) -> None:
    if old_grep:  # as that of Android 13: without -z it sees the first variable, which is another
        device = device.with_tool("grep", 'case $1 in *z*) real "$@" ;; esac\nexit 1')
    run_dir = device.make_run()
    script = "(setsid sh -c '(setsid sleep 303 &)' &); sleep 0.3"
    done = device.run("run.sh", run_dir, "20", "log", "--", "sh", "-c", script)
    assert (outcome(done.stdout)[0], outcome(done.stdout)[-1]) == ("0", "0")
    assert marked_processes(run_dir) == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_the_run_ends_when_run_sh_is_hung_up(device: DeviceShell, number: signal.Signals) -> None:
    run_dir = device.make_run()
    process = device.start(
        "run.sh", run_dir, "60", "log", "--", "sh", "-c", "sleep 304 & sleep 305"
    )
    wait_for(
        lambda: (run_dir / ".qnnfarm/process").exists() and len(marked_processes(run_dir)) >= 2
    )
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=200)
    assert process.returncode == 129
    assert outcome(stdout)[5] == number.name.removeprefix("SIG")
    assert marked_processes(run_dir) == []


def test_peak_memory_is_that_of_the_largest_process_apart_from_mapped_files(
    device: DeviceShell,
) -> None:
    run_dir = device.make_run()
    (run_dir / "weights").write_bytes(b"w" * (48 << 20))
    code = (
        "import mmap, time; f = open('weights', 'rb');"
        " m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); sum(m[::4096]);"
        " own = bytearray(b'x') * (24 << 20); time.sleep(4)"
    )
    child = f"exec 3>&1; '{sys.executable}' -S -c \"{code}\"; true"
    done = device.run("run.sh", run_dir, "60", "log", "--", "sh", "-c", child)
    assert outcome(done.stdout)[0] == "0", (run_dir / "log").read_text()
    peaks = r"peak_rss_kb=(\d+) peak_anon_kb=(\d+) peak_file_kb=(\d+)"
    (line,) = re.findall(peaks, done.stdout)
    peak, anonymous, files = (int(kb) >> 10 for kb in line)
    assert 24 <= anonymous < 46
    assert 48 <= files < 75
    assert peak >= anonymous + 46


def test_a_runner_that_prints_without_end_is_stopped(device: DeviceShell) -> None:
    run_dir = device.make_run()
    # Where run.sh is killed with the test, nothing stops what it started: it has an end of its own.
    script = "yes garbage | head -c 8000000; sleep 60"
    done = device.run("run.sh", "-m", "1", run_dir, "30", "log", "--", "sh", "-c", script)
    assert done.returncode == 123
    assert outcome(done.stdout)[5] == "log-too-big"
    assert marked_processes(run_dir) == []


def test_a_run_whose_folder_is_removed_ends(device: DeviceShell) -> None:
    run_dir = device.make_run()
    process = device.start("run.sh", run_dir, "60", "log", "--", "sleep", "60")
    wait_for((run_dir / ".qnnfarm/process").exists)
    shutil.rmtree(run_dir)
    said, _ = process.communicate(timeout=200)
    assert outcome(said)[5] == "log-gone"
    assert process.returncode == 129


def test_cleanup_kills_what_a_killed_run_sh_left(device: DeviceShell) -> None:
    run_dir = device.make_run()
    script = "trap '' TERM; (setsid sleep 306 &); sleep 307; sleep 308"
    process = device.start("run.sh", run_dir, "60", "log", "--", "sh", "-c", script)
    wait_for((run_dir / ".qnnfarm/process").exists)

    def complete() -> bool:
        """From then on none of them comes or goes; `setsid` keeps its name where it is toybox."""
        commands = {command_of(pid) for pid in marked_processes(run_dir)}
        return bool({"sleep 306", "setsid sleep 306"} & commands) and "sleep 307" in commands

    wait_for(complete)
    process.kill()
    process.communicate()
    left = marked_processes(run_dir)
    assert len(left) >= 3
    done = device.run("cleanup.sh", run_dir)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"qnnfarm-cleanup killed={len(left)} leftover=0 removed=1\n"
    assert not run_dir.exists()
    assert not [pid for pid in left if is_alive(pid)]


def test_cleanup_ends_a_live_run(device: DeviceShell) -> None:
    run_dir = device.make_run()
    process = device.start("run.sh", run_dir, "60", "log", "--", "sleep", "309")
    wait_for(lambda: (run_dir / ".qnnfarm/process").exists() and marked_processes(run_dir))
    done = device.run("cleanup.sh", "-k", run_dir)
    stdout, _ = process.communicate(timeout=200)
    assert done.returncode == 0
    assert outcome(stdout)[5] == "TERM"
    assert run_dir.exists()
    assert marked_processes(run_dir) == []


def test_cleanup_spares_a_process_that_got_the_pid_of_run_sh(device: DeviceShell) -> None:
    run_dir = device.make_run()
    (run_dir / ".qnnfarm").mkdir()
    (run_dir / ".qnnfarm/process").write_text(f"{os.getpid()} 1\n")
    assert device.run("cleanup.sh", run_dir).returncode == 0
    assert not run_dir.exists()


def test_cleanup_removes_read_only_folders_but_nothing_behind_links(
    device: DeviceShell, tmp_path: Path
) -> None:
    run_dir = device.make_run()
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    (run_dir / "link").symlink_to(kept)
    (run_dir / "locked").mkdir()
    (run_dir / "locked/file").write_text("x")
    (run_dir / "locked").chmod(0o500)
    assert device.run("cleanup.sh", run_dir).returncode == 0
    assert not run_dir.exists()
    assert (kept / "file").read_text() == "x"
    assert device.run("cleanup.sh", run_dir).stdout.endswith("removed=0\n")


def test_cleanup_refuses_what_is_no_run_folder(device: DeviceShell, tmp_path: Path) -> None:
    elsewhere = tmp_path / "precious"
    elsewhere.mkdir()
    (device.work_root / "runs/link").symlink_to(elsewhere)
    runs = device.work_root / "runs"
    links = (runs / "link", f"{runs}/.hidden")
    for path in ("/", "", ".", "..", runs, runs / "..", elsewhere, *links):
        done = device.run("cleanup.sh", path)
        assert (done.returncode, done.stdout) == (2, ""), path
    assert elsewhere.exists()
    assert runs.exists()


_LATE_STAT = """
import pathlib, time
run, began, which = pathlib.Path({run!r}), {began!r}, {which!r}
with (run / "calls").open("a+") as calls:
    calls.write("x")
    calls.seek(0)
    if len(calls.read()) != which:
        raise SystemExit
entered = time.monotonic()
(run / "go").touch()
while True:
    try:
        stat = pathlib.Path("/proc", (run / "pid").read_text(), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        if (run / "done").exists():
            break
    else:
        if (run / "done").exists() and stat.rpartition(")")[2].split()[0] == "Z":
            break
    time.sleep(0.01)
while time.monotonic() - began < 4 * (entered - began):
    time.sleep(0.01)
"""
_GROWS_LATE = """
import os, pathlib, time
run = pathlib.Path({run!r})
(run / "pid").write_text(str(os.getpid()))
while not (run / "go").exists():
    time.sleep(0.01)
held = bytearray(150 << 20)
(run / "done").touch()
"""


@pytest.mark.parametrize("which", [1, 3])  # of the first look at the run, of the second
def test_a_peak_that_was_hardly_looked_at_is_none(device: DeviceShell, which: int) -> None:
    run_dir = device.make_run()
    slow = device.with_tool("stat", f"'{sys.executable}' -S '{run_dir}/stat.py'; real \"$@\"")
    run, began = str(run_dir), time.monotonic()
    (run_dir / "stat.py").write_text(_LATE_STAT.format(run=run, began=began, which=which))
    (run_dir / "grows.py").write_text(_GROWS_LATE.format(run=run))
    command = ["--", sys.executable, "-S", str(run_dir / "grows.py")]
    done = slow.run("run.sh", run_dir, "600", "log", *command, timeout_s=600)
    status, *_, peak_kb, elapsed_ms, reason, _leftover = outcome(done.stdout)
    assert (status, reason) == ("0", "exited"), (run_dir / "log").read_text()
    assert peak_kb == "0", f"{elapsed_ms} ms"
