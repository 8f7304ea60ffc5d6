import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.device_scripts.conftest import DeviceShell
from tests.system import program
from tests.waiting import wait_for


def put(folder: Path, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    (folder / digest).write_bytes(data)
    return digest


def test_setup_makes_and_describes_the_work_root(device: DeviceShell, tmp_path: Path) -> None:
    root = tmp_path / "new root" / "qnnfarm"
    for _ in range(2):
        done = device.run("setup.sh", root)
        assert (done.returncode, done.stderr) == (0, "")
        *facts, last = done.stdout.splitlines()
        assert last == "qnnfarm-setup ok=1"
        values = dict(line.split("=", 1) for line in facts)
        assert values["work_root"] == str(root)
        assert int(values["free_kb"]) > 0
        assert values["setsid"] == "1"
        assert sorted(p.name for p in root.iterdir()) == ["incoming", "runs", "store"]
        assert list((root / "incoming").iterdir()) == []


def test_setup_refuses_what_cannot_be_a_work_root(device: DeviceShell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert device.run("setup.sh", "relative").returncode == 2
    done = device.run("setup.sh", tmp_path / "file")
    assert done.returncode == 1
    assert done.stderr == f"error: cannot make the folder {tmp_path / 'file'}\n"


def test_a_device_without_a_link_named_sha256sum_hashes_with_toybox(
    device: DeviceShell, tmp_path: Path
) -> None:
    device = device.without_tool("sha256sum")
    (Path(device.environment["PATH"]) / "toybox").symlink_to(program("toybox"))
    assert device.run("setup.sh", tmp_path / "root").returncode == 0
    store, wrong = device.work_root / "store", "1" * 64
    good = put(store, b"good")
    (store / wrong).write_bytes(b"other bytes")
    done = device.run("verify.sh", device.work_root, stdin=f"{good} 4\n{wrong} 11\n")
    assert done.stdout.splitlines()[:2] == [f"ok {good}", f"bad {wrong}"]


def test_setup_names_a_missing_tool(device: DeviceShell, tmp_path: Path) -> None:
    def without_option(tool: str, option: str) -> DeviceShell:
        return device.with_tool(tool, f'case $* in *-*{option}*) exit 2 ;; esac\nreal "$@"')

    for lacking, reason in (
        (device.without_tool("flock"), "the device has no flock"),
        (without_option("grep", "z"), "the device's grep has no option -z"),
        (without_option("find", "mmin"), "the device's find has no option -mmin"),
        (device.without_tool("sha256sum"), "the device has no sha256sum or toybox"),
    ):
        done = lacking.run("setup.sh", tmp_path / "root")
        assert (done.returncode, done.stderr) == (1, f"error: {reason}\n")


def test_verify_tells_ok_missing_and_bad_in_order(device: DeviceShell) -> None:
    store = device.work_root / "store"
    good, empty = put(store, b"good"), put(store, b"")
    (store / ("1" * 64)).write_bytes(b"other bytes")
    (store / ("2" * 64)).symlink_to(store / good)
    (store / ("3" * 64)).mkdir()
    lines = [(good, 4), ("0" * 64, 4), ("1" * 64, 11), ("2" * 64, 4), ("3" * 64, 4), (empty, 0)]
    lines.append((good, 5))
    done = device.run("verify.sh", device.work_root, stdin="".join(f"{s} {n}\n" for s, n in lines))
    answers = ["ok", "missing", "bad", "bad", "bad", "ok", "bad"]
    expected = [f"{a} {s}" for a, (s, _) in zip(answers, lines, strict=True)]
    assert done.stdout.splitlines() == [*expected, "qnnfarm-verify ok=2 missing=1 bad=4 adopted=0"]
    assert done.returncode == 1


def test_verify_looks_again_at_what_is_replaced_meanwhile(
    device: DeviceShell, tmp_path: Path
) -> None:
    """The tool that hashes first moves another copy over the file, as another deployment does."""
    once = tmp_path / "once"
    moving = f'[ -e "{once}" ] || {{ : >"{once}"; cp "$1" "$1.new"; mv -f "$1.new" "$1"; }}'
    device = device.with_tool("sha256sum", f'{moving}\nreal "$@"')
    good = put(device.work_root / "store", b"good")
    done = device.run("verify.sh", device.work_root, stdin=f"{good} 4\n")
    assert once.exists()
    assert done.stdout.splitlines()[0] == f"ok {good}"


def test_verify_hashes_again_only_what_changed(device: DeviceShell, tmp_path: Path) -> None:
    """The tool that hashes is replaced by one that counts, and then does it."""
    count = tmp_path / "count"
    device = device.with_tool("sha256sum", f'echo "$1" >>"{count}"\nreal "$@"')
    store = device.work_root / "store"
    first, second = put(store, b"first"), put(store, b"second")
    wanted = f"{first} 5\n{second} 6\n"

    def hashed() -> list[str]:
        count.write_text("")
        answer = device.run("verify.sh", device.work_root, stdin=wanted).stdout
        return [*count.read_text().split(), answer.splitlines()[-1]]

    assert hashed() == [
        f"store/{first}",
        f"store/{second}",
        "qnnfarm-verify ok=2 missing=0 bad=0 adopted=0",
    ]
    assert hashed() == ["qnnfarm-verify ok=2 missing=0 bad=0 adopted=0"]
    status = (store / first).stat()
    (store / first).write_bytes(b"FIRST")
    os.utime(store / first, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hashed() == [f"store/{first}", "qnnfarm-verify ok=1 missing=0 bad=1 adopted=0"]
    (store / first).write_bytes(b"first")
    assert hashed() == [f"store/{first}", "qnnfarm-verify ok=2 missing=0 bad=0 adopted=0"]
    (store / ".memo" / first).write_bytes(b"\0\xff\n" * 1000)
    assert hashed() == [f"store/{first}", "qnnfarm-verify ok=2 missing=0 bad=0 adopted=0"]


def test_adopt_moves_good_contents_only(device: DeviceShell) -> None:
    incoming, store = device.work_root / "incoming", device.work_root / "store"
    good = put(incoming, b"good")
    (incoming / good).chmod(0o600)
    (incoming / ("1" * 64)).write_bytes(b"half")
    done = device.run("verify.sh", "-a", device.work_root, stdin=f"{good} 4\n{'1' * 64} 4\n")
    assert done.stdout.splitlines()[:2] == [f"adopted {good}", f"bad {'1' * 64}"]
    assert (store / good).read_bytes() == b"good"
    assert (store / good).stat().st_mode & 0o777 == 0o644
    assert [p.name for p in incoming.iterdir()] == ["1" * 64]
    assert not (store / ("1" * 64)).exists()


def test_adopt_finds_what_waits_in_any_area(device: DeviceShell) -> None:
    incoming, store = device.work_root / "incoming", device.work_root / "store"
    (incoming / "one").mkdir()
    (incoming / "two").mkdir()
    sha = put(incoming / "two", b"good")
    (incoming / "one" / sha).write_bytes(b"evil")
    (store / sha).mkdir()
    plain = device.run("verify.sh", device.work_root, stdin=f"{sha} 4\n")
    assert plain.stdout.splitlines()[0] == f"bad {sha}"
    done = device.run("verify.sh", "-a", device.work_root, stdin=f"{sha} 4\n{'0' * 64} 4\n")
    assert done.stdout.splitlines() == [
        f"adopted {sha}",
        f"missing {'0' * 64}",
        "qnnfarm-verify ok=0 missing=1 bad=0 adopted=1",
    ]
    assert (store / sha).read_bytes() == b"good"
    again = device.run("verify.sh", "-a", device.work_root, stdin=f"{sha} 4\n")
    assert again.stdout.splitlines()[0] == f"ok {sha}"


def test_verify_pins_what_it_is_asked_for(device: DeviceShell) -> None:
    sha = put(device.work_root / "store", b"good")
    old = device.work_root / "incoming" / "old"
    old.mkdir()
    (old / "part").write_text("x")
    os.utime(old / "part", (1_600_000_000, 1_600_000_000))
    live = device.work_root / "incoming" / "live"
    live.mkdir()
    (live / "part").write_text("x")
    link = device.work_root / "incoming" / "probe.123.link"  # of a setup that was killed
    link.symlink_to("probe")
    os.utime(link, (1_600_000_000, 1_600_000_000), follow_symlinks=False)
    done = device.run("verify.sh", "-a", "-p", "area", device.work_root, stdin=f"{sha} 4\n")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"ok {sha}")
    assert (device.work_root / "incoming/area/.wants").read_text() == f"{sha} 4\nend\n"
    assert not old.exists()
    assert not link.is_symlink()
    assert live.exists()
    for bad in ("../x", "", "a b"):
        assert device.run("verify.sh", "-p", bad, device.work_root).returncode == 2


def test_a_host_that_hangs_keeps_nobody_from_evicting(device: DeviceShell) -> None:
    hanging = subprocess.Popen(
        device.command("verify.sh", "-p", "area", device.work_root),
        env=device.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert hanging.stdin is not None
    try:
        wait_for(lambda: list((device.work_root / "incoming").glob("area/.*")))
        assert device.run("evict.sh", device.work_root, "0", "-").returncode == 0
    finally:
        hanging.stdin.close()
        hanging.wait(200)
    assert (device.work_root / "incoming/area/.wants").read_text() == "end\n"


def test_a_large_file_is_hashed_by_openssl_where_there_is_one(
    device: DeviceShell, tmp_path: Path
) -> None:
    called = tmp_path / "called"
    large, small = (put(device.work_root / "store", b"x" * size) for size in (10_000_000, 10))
    for answer in (f"{large} *file", "not a hash", f"{'0' * 64} *file"):
        shutil.rmtree(device.work_root / "store" / ".memo", ignore_errors=True)
        device = device.with_tool("openssl", f'echo "$4" >>"{called}"\necho "{answer}"')
        done = device.run("verify.sh", device.work_root, stdin=f"{large} 10000000\n{small} 10\n")
        expected = "bad" if answer.startswith("0" * 64) else "ok"
        assert done.stdout.splitlines()[:2] == [f"{expected} {large}", f"ok {small}"]
    assert set(called.read_text().split()) == {f"store/{large}"}


def test_link_tells_when_a_content_was_used(device: DeviceShell) -> None:
    store = device.work_root / "store"
    sha = put(store, b"content")
    assert device.run("verify.sh", device.work_root, stdin=f"{sha} 7\n").returncode == 0
    os.utime(store / ".memo" / sha, (1, 1))
    changed = (store / sha).stat().st_ctime_ns
    assert device.run("link.sh", device.work_root, "r", stdin=f"{sha} f 0644\n").returncode == 0
    assert (store / ".memo" / sha).stat().st_mtime > 1_700_000_000
    assert (store / sha).stat().st_ctime_ns == changed


@pytest.mark.parametrize(
    "line",
    ["", "x 1", f"{'A' * 64} 1", f"{'0' * 63} 1", f"{'0' * 64} -1", f"{'0' * 64}",
     f"{'0' * 64} 1 2", "../../etc/passwd 1"],
)  # fmt: skip
def test_verify_refuses_a_malformed_list(device: DeviceShell, line: str) -> None:
    done = device.run("verify.sh", device.work_root, stdin=line + "\n")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no line of the form SHA256 SIZE: ")


NAMES = [
    "plain", "a b", "a  b ", " leading", "q\"uo'te", "$(id)", "-n", "日本/é", "a/b/c", "a\\b", "*",
    "..x", "x..",
]  # fmt: skip


def test_link_makes_a_run_folder_of_any_good_names(device: DeviceShell) -> None:
    sha = put(device.work_root / "store", b"content")
    lines = "".join(f"{sha} {name} 0644\n" for name in NAMES)
    done = device.run("link.sh", device.work_root, "run.1", stdin=lines + f"{sha} tool 0755\n")
    run_dir = device.work_root / "runs/run.1"
    assert done.stdout == f"run_dir={run_dir}\nqnnfarm-link files={len(NAMES) + 1}\n", done.stderr
    for name in [*NAMES, "tool"]:
        assert (run_dir / name).readlink() == device.work_root / "store" / sha
    assert os.access(run_dir / "tool", os.X_OK)
    again = device.run("link.sh", device.work_root, "run.1", stdin=lines)
    assert (again.returncode, again.stdout) == (1, "")
    assert "is there already" in again.stderr


def test_link_does_not_add_to_a_run_that_somebody_makes_meanwhile(device: DeviceShell) -> None:
    run_dir = device.work_root / "runs/r"
    late = device.with_tool("mv", f'mkdir "{run_dir}"\nreal "$@"')
    sha = put(device.work_root / "store", b"content")
    done = late.run("link.sh", device.work_root, "r", stdin=f"{sha} f 0644\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is there already" in done.stderr
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/abs", "../x", "a/../../x", "a/..", "./a", "a/./b", "a//b", "a/", "tab\there",
     "\x01", ".qnnfarm", ".qnnfarm/marker"],
)  # fmt: skip
def test_link_refuses_names_that_leave_the_folder(
    device: DeviceShell, tmp_path: Path, name: str
) -> None:
    sha = put(device.work_root / "store", b"content")
    before = sorted(tmp_path.rglob("*"))
    done = device.run(
        "link.sh", device.work_root, "r", stdin=f"{sha} good 0644\n{sha} {name} 0644\n"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_link_leaves_nothing_when_it_fails(device: DeviceShell) -> None:
    sha = put(device.work_root / "store", b"content")
    cases = {
        f"{sha} a 0644\n{'0' * 64} b 0644\n": 1,
        f"{sha} a 0644\n{sha} a 0644\n": 2,
        f"{sha} a 0644\n{sha} a/b 0644\n": 2,
        f"{sha} a 4755\n": 2,
        f"{sha} a\n": 2,
        f"{sha}\n": 2,
        "\n": 2,
    }
    for lines, status in cases.items():
        done = device.run("link.sh", device.work_root, "r", stdin=lines)
        assert (done.returncode, done.stdout) == (status, ""), lines
        assert list((device.work_root / "runs").iterdir()) == []
    for run_id in ("", ".", "..", "../x", "a/b", "a b", "-k", ".hidden", "x" * 129, "é"):
        assert device.run("link.sh", device.work_root, run_id).returncode == 2
