"""The least of what the machine and the control groups leave."""

from pathlib import Path

import pytest

from buildlib.builder.scheduler import available_memory

MEMINFO = "MemTotal:       8000000 kB\nMemAvailable:   4000000 kB\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory() < 1 << 50


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("", {}, 4_000_000 * 1024),
        ("0::/a/b\n", {"a/memory.max": "900", "a/memory.current": "400"}, 500),
        (
            "0::/a/b\n",
            {
                "a/memory.max": "900",
                "a/memory.current": "400",
                "a/memory.stat": "anon 300\ninactive_file 50\n",
                "a/b/memory.max": "max",
                "a/b/memory.current": "400",
            },
            550,
        ),
        (
            "4:cpu,memory:/x\n1:name=systemd:/\n",
            {"memory/x/memory.limit_in_bytes": "70", "memory/x/memory.usage_in_bytes": "90"},
            0,
        ),
        ("garbage\n::\n0:memory\n", {}, 4_000_000 * 1024),
    ],
)
def test_the_tightest_group_counts(
    membership: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    write(tmp_path / "proc" / "meminfo", MEMINFO)
    write(tmp_path / "proc" / "self" / "cgroup", membership)
    for name, text in files.items():
        write(tmp_path / "cgroup" / name, text + "\n")
    assert available_memory(tmp_path / "proc", tmp_path / "cgroup") == expected


def test_nothing_known_is_4_gib(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path) == 4 << 30
