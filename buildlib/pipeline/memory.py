"""How much memory this process and its children may still take."""

from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_UNKNOWN = 4 << 30


def available_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Bytes: the least of what the machine has and what the control groups above us leave.

    Where neither says anything, 4 GiB.
    """
    limits = [*_machine(proc / "meminfo"), *_control_groups(proc / "self" / "cgroup", cgroup)]
    return max(0, min(limits, default=_UNKNOWN))


def _machine(meminfo: Path) -> list[int]:
    for line in _text(meminfo).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and rest.split():
            return [int(rest.split()[0]) * 1024]
    return []


def _control_groups(membership: Path, root: Path) -> list[int]:
    """What every group from ours to the root leaves, of either version of control groups."""
    left = []
    for line in _text(membership).splitlines():
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        relative = Path(path.lstrip("/"))
        for group in (relative, *relative.parents):
            most, used = (_text(base / group / name).strip() for name in (limit, usage))
            if most.isdigit() and used.isdigit():
                left.append(int(most) - int(used) + _reclaimable(base / group))
    return left


def _reclaimable(group: Path) -> int:
    """Page cache that the kernel gives up when memory is short."""
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in {"inactive_file", "total_inactive_file"} and value.isdigit():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
