"""Putting the files of a run on a device, and taking the run away again."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.clock import Deadline
from harness.deploy.deployment import DeployedFile, DeployFile, Deployment, Progress
from harness.deploy.digests import FileDigest, hash_files
from harness.deploy.scripts import ensure_scripts
from harness.deploy.store import (
    DeviceStore,
    EvictionPolicy,
    Room,
    StoreUsage,
    make_room,
    read_usage,
)
from harness.devices.device import Device
from harness.errors import HostFileError

DEPLOY_TIMEOUT_S = 1800.0

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NAME_MAX = 1024
_PART_MAX = 255  # bytes, of every file system there


@dataclass(frozen=True, slots=True)
class _Planned:
    name: str
    file: DeployFile
    digest: FileDigest


def deploy(
    device: Device,
    files: Mapping[str, DeployFile | Path],
    *,
    run_id: str,
    timeout_s: float = DEPLOY_TIMEOUT_S,
    on_progress: Progress | None = None,
    policy: EvictionPolicy | None = None,
) -> Deployment:
    """Make a run folder on `device` out of `files`, pushing contents that the device lacks.

    Contents that an interrupted deployment had pushed whole are not pushed again. On a full device,
    contents of the store that no run and no deployment uses are evicted, if that is enough.

    Args:
        device: where to; other hosts may deploy to it at the same time.
        files: by their names, which are relative paths inside the run folder.
        run_id: names the run folder, which must not exist: letters, digits, `.`, `_`, `-`.
        timeout_s: for all of it.
        on_progress: called with the bytes pushed so far and the bytes to push.
        policy: how much room to leave, and how large the store may grow.

    Raises:
        HostFileError: a file cannot be read, or has a name that no run folder can hold.
        DeviceFullError: the missing contents do not fit, not even after an eviction.
        DeploymentCorruptError: a file arrived with another content.
        DeviceCommandError: the device lacks a tool, or the run exists.
    """
    deadline = Deadline.for_device(device.serial, "deployment", timeout_s)
    stages: dict[str, float] = {}

    def end_stage(name: str) -> None:
        stages[name] = deadline.elapsed_s - sum(stages.values())

    plan = _plan(files)
    contents = {item.digest: item.file.path for item in plan}
    end_stage("hash on the host")
    scripts_dir = ensure_scripts(device, deadline)
    end_stage("scripts")
    with DeviceStore(device, scripts_dir, deadline, policy or EvictionPolicy()) as store:
        answers = store.holds(list(contents))
        new = {d: path for d, path in contents.items() if d.sha256 not in answers}
        end_stage("look for contents")
        room = store.add(new, on_progress)
        end_stage("push contents")
        run_dir = store.link(run_id, [(i.name, i.digest, i.file.executable) for i in plan])
        end_stage("link the run folder")
    pushed_bytes = sum(digest.size for digest in new)
    adopted = {sha256 for sha256, answer in answers.items() if answer == "adopted"}
    return Deployment(
        serial=device.serial,
        run_id=run_id,
        scripts_dir=scripts_dir,
        run_dir=run_dir,
        files=tuple(
            DeployedFile(i.name, i.digest.sha256, i.digest.size, i.digest in new) for i in plan
        ),
        pushed_bytes=pushed_bytes,
        reused_bytes=sum(digest.size for digest in contents) - pushed_bytes,
        resumed_bytes=sum(digest.size for digest in contents if digest.sha256 in adopted),
        evicted_bytes=room.evicted_bytes if room else 0,
        elapsed_s=deadline.elapsed_s,
        stages=tuple(stages.items()),
    )


def remove_run(device: Device, run_id: str, *, timeout_s: float = 60.0) -> None:
    """Kill the processes of a run and remove its folder; the store stays.

    A run that is not there is no error.
    """
    deadline = Deadline.for_device(device.serial, f"removal of run {run_id}", timeout_s)
    scripts_dir = ensure_scripts(device, deadline)
    run_dir = f"{device.work_root}/runs/{run_id}"
    device.shell(["sh", f"{scripts_dir}/cleanup.sh", run_dir], timeout_s=deadline.remaining())


def store_usage(device: Device, *, timeout_s: float = 30.0) -> StoreUsage:
    """Return the contents of the store of `device`, without hashing them."""
    return read_usage(device, Deadline.for_device(device.serial, "listing", timeout_s))


def evict(device: Device, policy: EvictionPolicy, *, timeout_s: float = 60.0) -> Room:
    """Bring the content store of `device` within `policy` by evicting unused contents.

    Contents are removed in the order of their last use, the oldest first. `Room.met` tells whether
    that was enough; if not, nothing is removed.
    """
    deadline = Deadline.for_device(device.serial, "eviction", timeout_s)
    return make_room(device, ensure_scripts(device, deadline), deadline, policy, 0)


def _plan(files: Mapping[str, DeployFile | Path]) -> list[_Planned]:
    deploy_files = {n: f if isinstance(f, DeployFile) else DeployFile(f) for n, f in files.items()}
    for name in deploy_files:
        if not can_be_named(name):
            raise HostFileError(name, "this cannot be a file's name inside a run folder")
    digests = hash_files({file.path for file in deploy_files.values()})
    return [_Planned(name, file, digests[file.path]) for name, file in deploy_files.items()]


def can_be_named(name: str) -> bool:
    """Return whether a run folder can hold a file of that name, which may lie in sub-folders."""
    try:
        parts = name.encode("utf-8", "surrogateescape").split(b"/")
    except UnicodeEncodeError:
        return False
    if parts[0] == b".qnnfarm" or {b"", b".", b".."} & set(parts) or _CONTROL.search(name):
        return False
    return max(map(len, parts)) <= _PART_MAX and len(b"/".join(parts)) <= _NAME_MAX
