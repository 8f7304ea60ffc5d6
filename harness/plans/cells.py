"""Cells: one workload of one container in one session, on one device of a kind."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from harness.plans.plan_file import Retries
from harness.pool.failure_policy import work_id
from harness.pool.requirement import Requirement
from harness.runtimes.registry import DEFAULT_RUNTIME
from harness.workloads.registry import AnyWorkload


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to do once on one device. Cells pickle, and go to JSON and back.

    Attributes:
        key: SHA-256 of all that it measures; the same cell has it in every run of every plan.
        group: the same for all sessions of a cell, and for no other.
        label: for people: `CONTAINER/DEVICES/WORKLOAD`, with runtime, session and replica if there
            are several. Unique in its plan.
        requirement: of the device; asks for one.
        folder: of the workload's relative paths.
        container: folder or file that the runtime runs; `None` for a plain command.
        affinity: the container's hash; cells of one affinity share their files on a device.
        anti_affinity: cells of one anti-affinity go onto different devices; empty for any.
        work: id of its work and time limit, as `Work` has it: the same for its sessions and
            replicas, and in the plans of other users.
        session: counted from 0.
    """

    key: str
    group: str
    label: str
    workload: AnyWorkload
    requirement: Requirement
    folder: Path = Path()
    container: Path | None = None
    runtime: str = DEFAULT_RUNTIME
    affinity: str = ""
    anti_affinity: str = ""
    work: str = ""
    session: int = 0
    retries: Retries = field(default_factory=Retries)
    timeout_s: float = 3600.0

    def to_json(self) -> str:
        """Write it as JSON."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Cell":
        """Read one from JSON; `ValueError` if it is none."""
        return _ADAPTER.validate_json(text)


_ADAPTER: TypeAdapter[Cell] = TypeAdapter(Cell)


def make_cell(
    label: str,
    workload: AnyWorkload,
    requirement: Requirement,
    *,
    folder: Path = Path(),
    container: Path | None = None,
    runtime: str = DEFAULT_RUNTIME,
    container_sha256: str = "",
    content: str = "",
    conditions: Mapping[str, object] | None = None,
    session: int = 0,
    replica: int = 0,
    spread: bool = False,
    retries: Retries | None = None,
    timeout_s: float = 3600.0,
) -> Cell:
    """Make a cell with its key.

    Args:
        content: SHA-256 of the file that the workload reads on this host.
        conditions: that its measurement begins under.
        replica: which of several devices of the same requirement.
        spread: whether its replicas go onto different devices.
    """
    fields = workload.model_dump(mode="json")
    work = {
        "container": container_sha256,
        "work": {k: v for k, v in fields.items() if k not in workload.later_keys or v is not None},
        "content": content,
    }
    if runtime != DEFAULT_RUNTIME:  # cells of older journals have no other
        work["runtime"] = runtime
    identity = work | {
        "conditions": dict(conditions or {}),
        "requirement": asdict(requirement) | {"tags": sorted(requirement.tags)},
        "replica": replica,
    }
    group = _digest(identity)
    replicas = identity | {"replica": None, "session": session}
    return Cell(
        key=_digest({"group": group, "session": session}),
        group=group,
        label=label,
        workload=workload,
        requirement=requirement,
        folder=folder,
        container=container,
        runtime=runtime,
        affinity=container_sha256,
        anti_affinity=_digest(replicas) if spread else "",
        work=work_id(container_sha256, _digest(work | {"timeout_s": timeout_s})),
        session=session,
        retries=retries or Retries(),
        timeout_s=timeout_s,
    )


def duplicate(cell: Cell, number: int) -> Cell:
    """Make the same cell once more, for a plan that asks for it again.

    Args:
        number: counted from 1.
    """

    def of_copy(digest: str) -> str:
        return _digest({"of": digest, "copy": number})

    return replace(
        cell,
        key=of_copy(cell.key),
        group=of_copy(cell.group),
        anti_affinity=of_copy(cell.anti_affinity) if cell.anti_affinity else "",
    )


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
