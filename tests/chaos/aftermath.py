"""The pool after a case: whole again by its own means, with nothing left anywhere."""

import hashlib
import os
import re
import shlex
import sqlite3
import time
from pathlib import Path

from harness.pool.pool import Pool
from harness.pool.requirement import Requirement
from harness.pool.states import MemberState
from plugins.virtual_android.events import LoggedEvent
from tests.chaos import push_scene
from tests.chaos.actors import Actor, Tell, conduct
from tests.chaos.drawing import DEVICES, Case
from tests.chaos.lab import Farm, Lab, patient

_WHOLE_S = 60.0
_ACQUIRE_S = 45.0
_END_S = 6.0
_POLL_S = 0.05
_DAYS_S = 3 * 86_400
_FOREIGN = """\
cd /proc
for file in $(grep -lsF -e "QNNFARM_DEVICE=$QNNFARM_DEVICE" [0-9]*/environ); do
  [ ${{file%%/*}} = $PPID ] || grep -qsF -e {} $file || tr '\\0' ' ' <${{file%/*}}/cmdline
done 2>/dev/null
"""
"""Tells all processes but those of our lease and the shell around this one, which has no mark."""
_ENTRIES = {"store", "runs", "incoming", "scripts", "fence"}


def complaints(lab: Lab, farm: Farm, case: Case, struck: set[str], *, untouched: bool) -> list[str]:
    """What is not as it should be once all faults are cleared; puts nothing right itself.

    Args:
        untouched: nothing befell the case, and it is one that leaves nothing behind.
    """
    found = [f"before the next holder: {what}" for what in processes(farm)] if untouched else []
    for number in range(DEVICES):
        farm.commands(number).clear()
        _wait_until_down(farm, number)
        _age(farm.work_root(number) / "incoming")
        _age(farm.work_root(number) / "scripts", depth=1, hidden=True)
    user = Actor("next user", lambda tell: _use(lab, farm, case, tell), _log(lab, case))
    conduct([user], [], patient(_WHOLE_S))
    if user.end["end"] != "well":
        return [*found, f"the pool is not whole again: {user.end}"]
    found += [line["complaint"] for line in user.told if "complaint" in line]
    found += processes(farm)
    found += _ledger(lab)
    tokens = {line["member"]: line["token"] for line in user.told if "member" in line}
    for number in range(DEVICES):
        root = farm.work_root(number)
        found += _fence(root, tokens[farm.member(number)], number)
        found += _store(lab, root, number, struck)
        found += _leftovers(root, number, deployed=case.scene == "push" and number == 0)
    return found


def processes(farm: Farm) -> list[str]:
    """What still runs on devices, as this host sees it, after what ends had time to end."""
    deadline = time.monotonic() + patient(_END_S)
    while left := [line for number in range(DEVICES) for line in _running(farm, number)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)
    return []


def _running(farm: Farm, number: int) -> list[str]:
    mark, found = farm.mark(number), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                words = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                if words:  # else it is a zombie
                    found.append(f"process left on d{number}: {words[:300]}")
        except OSError:
            continue
    return found


def _use(lab: Lab, farm: Farm, case: Case, tell: Tell) -> None:
    """The next user: gets every device, and finds it in order."""
    with Pool.open(farm.pool_file) as pool:
        for number in range(DEVICES):
            requirement = Requirement(name=farm.member(number))
            while True:
                with pool.acquire(
                    requirement, timeout_s=patient(_ACQUIRE_S), purpose="aftermath"
                ) as lease:
                    device = lease.device
                    mine = shlex.quote(f"lease:{device.fence.id}.{lease.token}-")
                    seen = device.shell(_FOREIGN.format(mine), check=False).stdout.strip()
                    if seen:
                        tell({"complaint": f"d{number} itself sees {seen!r}"})
                    if case.scene == "push" and number == 0:
                        # What a busy device cleared away late made its folder new again.
                        _age(farm.work_root(number) / "incoming")
                        push_scene.again(lab, device, case, tell)
                    token = lease.token
                states = {status.name: status for status in pool.members()}
                if states[device.member].state is MemberState.READY:
                    break
            tell({"member": device.member, "token": token})
        for status in pool.members():
            if status.state is not MemberState.READY:
                tell({"complaint": f"{status.name} is {status.state}: {status.reason}"})


def _ledger(lab: Lab) -> list[str]:
    with sqlite3.connect(f"file:{lab.ledger}?mode=ro", uri=True) as db:
        leases = db.execute("SELECT key, purpose, label FROM pool_leases").fetchall()
        tickets = db.execute("SELECT id, label FROM pool_tickets").fetchall()
        sound = db.execute("PRAGMA integrity_check").fetchone()[0]
    db.close()
    found = [f"a lease stays: {lease}" for lease in leases]
    found += [f"a ticket stays: {ticket}" for ticket in tickets]
    return found if sound == "ok" else [*found, f"the ledger is damaged: {sound}"]


def _fence(root: Path, token: int, number: int) -> list[str]:
    files = [file.name for file in (root / "fence").glob("[0-9]*")]
    tokens = [name.partition("-")[0] for name in files]  # of the one ledger of the lab
    return [] if tokens == [str(token)] else [f"fence of d{number}: {files}, not {token}"]


def _store(lab: Lab, root: Path, number: int, struck: set[str]) -> list[str]:
    """Contents have the hash that they are named by.

    What a power cut emptied stays so until a deployment asks for it.
    """
    found = []
    for file in (root / "store").iterdir():
        if file.name.startswith("."):
            continue
        if not re.fullmatch(r"[0-9a-f]{64}", file.name) or not file.is_file():
            found.append(f"d{number} has store/{file.name}")
        elif file.stat().st_size > _LARGE:
            continue
        elif hashlib.sha256(file.read_bytes()).hexdigest() != file.name:
            known = (file, file.stat().st_mtime_ns)
            if "power" in struck and not file.stat().st_size:
                lab.emptied.add(known)
            if known in lab.emptied:
                continue
            found.append(f"d{number}: store/{file.name} has another content")
    return found


def _leftovers(root: Path, number: int, *, deployed: bool) -> list[str]:
    """Of runs nothing stays; what waits for a deployment to resume goes when it is days old."""
    found = [f"d{number} has {path.name}" for path in root.iterdir() if path.name not in _ENTRIES]
    found += [f"d{number} has runs/{path.name}" for path in (root / "runs").glob("*")]
    if deployed:
        for folder in ("incoming", "scripts"):
            left = [path.name for path in (root / folder).iterdir()]
            old = left if folder == "incoming" else [name for name in left if name[0] == "."]
            found += [f"d{number} has {folder}/{name}" for name in old]
    return found


def _wait_until_down(farm: Farm, number: int) -> None:
    """Let a power cut that has struck take what it takes: it goes by when files were changed."""
    deadline = time.monotonic() + patient(_END_S)
    while time.monotonic() < deadline:
        events = farm.commands(number).events()
        told = [event.kind for event in events if event.kind in {"off", "booted"} or _cuts(event)]
        if not told or told[-1] != "struck":
            return
        time.sleep(_POLL_S)


def _cuts(event: LoggedEvent) -> bool:
    return bool(event.kind == "struck" and event.fault.startswith("power"))


def _age(folder: Path, *, depth: int = 3, hidden: bool = False) -> None:
    """Let what lies there be days old."""
    then = time.time() - _DAYS_S
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        if len(inside.parts) <= depth and (not hidden or inside.parts[0].startswith(".")):
            os.utime(path, (then, then), follow_symlinks=False)


def _log(lab: Lab, case: Case) -> Path:
    return lab.folder / f"{case.name}-aftermath.log"


_LARGE = 16 << 20
"""Larger contents, such as libraries, are hashed by whoever uses them next."""
