"""What kind of namespace this machine grants, found by making one.

As a program, `python -m harness.virtual_device.probe KIND` makes one and exits 0, or says why it
could not: a process that entered a namespace cannot leave it again.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.virtual_device.filesystem import DEVICE_FOLDERS
from harness.virtual_device.namespace import (
    NamespaceKind,
    NamespaceSupport,
    enter_device_root,
    unshare,
)

FORCE_VARIABLE = "QNNFARM_VIRTUAL_NAMESPACE"
"""Environment variable that forces a kind: `root`, `user`, `none`, or `auto`."""

_TIMEOUT_S = 20.0


def probe_namespace() -> NamespaceSupport:
    """The best kind that works here, or the one that `QNNFARM_VIRTUAL_NAMESPACE` forces."""
    forced = os.environ.get(FORCE_VARIABLE, "auto")
    if forced in {kind.value for kind in NamespaceKind}:
        return NamespaceSupport(NamespaceKind(forced), f"{FORCE_VARIABLE}={forced}")
    reasons: list[str] = []
    for kind in (NamespaceKind.ROOT, NamespaceKind.USER):
        if kind is NamespaceKind.ROOT and os.geteuid() != 0:
            reasons.append("not root")
            continue
        failure = try_namespace(kind)
        if failure is None:
            return NamespaceSupport(kind, "; ".join(reasons))
        reasons.append(f"{kind.value} namespace: {failure}")
    return NamespaceSupport(NamespaceKind.NONE, "; ".join(reasons))


def try_namespace(kind: NamespaceKind) -> str | None:
    """Make a namespace of that kind in a child process; why it failed, or `None`."""
    command = [sys.executable, "-P", "-m", "harness.virtual_device.probe", kind.value]
    with tempfile.TemporaryDirectory(prefix="qnnfarm-probe-") as folder:
        try:
            done = subprocess.run(
                [*command, folder],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def _attempt(kind: NamespaceKind, folder: Path) -> int:
    root, mount_point = folder / "root", folder / "mnt"
    mount_point.mkdir()
    for name in DEVICE_FOLDERS:
        (root / name).mkdir(parents=True)
    try:
        unshare(kind)
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        enter_device_root(root, mount_point)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_attempt(NamespaceKind(sys.argv[1]), Path(sys.argv[2])))
