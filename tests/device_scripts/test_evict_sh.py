"""evict.sh under the shells and tools of a device."""

import hashlib
import os
import re
import time
from pathlib import Path

from tests.device_scripts.conftest import DeviceShell

_FILL = 999_999_999
_KIB = 1024


def put(device: DeviceShell, name: str, used_at: int | None, size: int = 64 * _KIB) -> str:
    """A content, with a memo that says when it was used."""
    data = name.encode().ljust(size, b".")
    sha256 = hashlib.sha256(data).hexdigest()
    store = device.work_root / "store"
    (store / sha256).write_bytes(data)
    (store / ".memo").mkdir(exist_ok=True)
    if used_at is not None:
        (store / ".memo" / sha256).write_text("memo\n")
        os.utime(store / ".memo" / sha256, (used_at, used_at))
    return sha256


def link(device: DeviceShell, run: str, sha256: str) -> None:
    folder = device.work_root / "runs" / run / "a b"
    folder.mkdir(parents=True)
    (folder / "file").symlink_to(device.work_root / "store" / sha256)


def want(device: DeviceShell, area: str, sha256: str) -> Path:
    folder = device.work_root / "incoming" / area
    folder.mkdir()
    (folder / ".wants").write_text(f"{sha256} 1\nend\n")
    return folder


def held(device: DeviceShell) -> set[str]:
    return {path.name for path in (device.work_root / "store").iterdir() if path.is_file()} - {
        ".lock"
    }


def evict(device: DeviceShell, free_kb: object, store_kb: object) -> dict[str, str]:
    done = device.run("evict.sh", device.work_root, str(free_kb), str(store_kb))
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith("qnnfarm-evict evicted=")
    facts = dict(re.findall(r"(\w+)=(\d+)", done.stdout))
    assert done.returncode == (0 if facts["met"] == "1" else 1)
    return facts


def test_nothing_goes_while_there_is_room(device: DeviceShell) -> None:
    contents = {put(device, "a", 1), put(device, "b", 2)}
    facts = evict(device, 0, "-")
    assert int(facts["free_kb"]) > 0
    assert (facts["evictable_kb"], facts["store_kb"]) == ("128", "128")
    assert (facts["evicted"], facts["met"]) == ("0", "1")
    assert held(device) == contents


def test_the_longest_unused_goes_first_and_no_more_than_needed(device: DeviceShell) -> None:
    b, a, c = put(device, "b", 20), put(device, "a", 10), put(device, "c", 1_700_000_000)
    unknown = put(device, "never used", None)
    facts = evict(device, 0, 200)
    assert (facts["evicted"], facts["evicted_kb"], facts["store_kb"]) == ("1", "64", "192")
    assert held(device) == {a, b, c}
    assert unknown not in held(device)
    assert evict(device, 0, 100)["evicted"] == "2"
    assert held(device) == {c}
    assert [path.name for path in (device.work_root / "store/.memo").iterdir()] == [c]


def test_content_in_use_is_never_evicted(device: DeviceShell) -> None:
    linked, wanted, free = put(device, "a", 1), put(device, "b", 2), put(device, "c", 3)
    link(device, ".run.building", linked)
    want(device, "live", wanted)
    assert evict(device, 0, 10)["met"] == "0"
    assert held(device) == {linked, wanted, free}
    facts = evict(device, 0, 128)
    assert (facts["evicted"], facts["evictable_kb"], facts["met"]) == ("1", "0", "1")
    assert held(device) == {linked, wanted}


def test_where_it_does_not_help_nothing_goes(device: DeviceShell) -> None:
    contents = {put(device, name, 1) for name in "abc"}
    facts = evict(device, _FILL, "-")
    assert (facts["met"], facts["evictable_kb"], facts["evicted"]) == ("0", "192", "0")
    assert held(device) == contents


def test_leftovers_of_dead_runs_are_evicted_for_space(device: DeviceShell) -> None:
    wanted = put(device, "a", 1)
    dead, live = want(device, "dead", wanted), want(device, "live", "0" * 64)
    hour_ago = time.time() - 3600
    os.utime(dead / ".wants", (hour_ago, hour_ago))
    evict(device, 0, "-")
    assert dead.exists()
    evict(device, _FILL, "-")
    assert not dead.exists()
    assert live.exists()
    assert evict(device, 0, 0)["evicted"] == "1"


def test_an_area_that_is_a_link_costs_nobody_anything(device: DeviceShell, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("mine")
    os.utime(other / "file", (1, 1))
    (device.work_root / "incoming" / "area").symlink_to(other)
    evict(device.with_tool("rm", 'exec /bin/rm "$@"'), _FILL, "-")
    assert (other / "file").exists()


def test_leftovers_dated_in_the_future_age_too(device: DeviceShell) -> None:
    area = device.work_root / "incoming" / "dead"
    area.mkdir()
    file = area / ("0" * 64)
    file.write_text("x")
    os.utime(file, (4_000_000_000, 4_000_000_000))
    evict(device, _FILL, "-")
    assert abs(file.stat().st_mtime - time.time()) < 600


def test_names_that_are_no_contents_are_let_be(device: DeviceShell) -> None:
    odd = device.work_root / "store" / "not a hash\n$(id)"
    odd.write_text("x")
    (device.work_root / "runs" / "r").mkdir()
    (device.work_root / "runs" / "r" / "l").symlink_to("$(touch hacked)\nkept_x=1;store/`id`")
    gone = put(device, "a", 1)
    assert evict(device, 0, 0)["evicted"] == "1"
    assert held(device) == {odd.name}
    assert gone not in held(device)
    assert not list(device.work_root.rglob("hacked"))


def test_no_work_root(device: DeviceShell, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        done = device.run("evict.sh", folder, "1", "-")
        assert done.returncode == 1
        assert "run setup.sh" in done.stderr


def test_content_linked_during_eviction_stays(device: DeviceShell) -> None:
    """A deployment links its run and takes its wants back, without asking for the lock."""
    content = put(device, "a", 1)
    area, run = want(device, "area", content), device.work_root / "runs" / "run"
    run.mkdir()
    after_runs = f"""
        (real "$@")
        case $1 in runs)
            ln -s "{device.work_root}/store/{content}" "{run}/file"
            rm -rf "{area}"
        esac
    """
    done = device.with_tool("find", after_runs).run("evict.sh", device.work_root, "0", "0")
    assert "evicted=0" in done.stdout
    assert (run / "file").exists()
