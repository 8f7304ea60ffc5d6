"""A cell: one workload of one container in one session, on one device of a kind."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from harness.plans.plan_file import Retries
from harness.pool.requirement import Requirement
from harness.workloads.registry import AnyWorkload


@dataclass(frozen=True, slots=True)
class Cell:
    """What one lease of one device is used for.

    Attributes:
        key: SHA-256 of all that it measures; the same cell has it in every run of every plan.
        group: the same for all sessions of a cell, and for no other.
        label: for people: `CONTAINER/DEVICES/WORKLOAD`, and session and replica where there are
            several. Unique in its plan.
        workload: what is to be done.
        requirement: which devices will do; asks for one.
        folder: what the workload's relative paths are relative to.
        container: its folder; `None` for a plain command.
        affinity: cells with the same affinity share what lies on a device: the container's hash.
        spread: cells with the same spread go onto different devices; empty for no such wish.
        session: counted from 0.
    """

    key: str
    group: str
    label: str
    workload: AnyWorkload
    requirement: Requirement
    folder: Path = Path()
    container: Path | None = None
    affinity: str = ""
    spread: str = ""
    session: int = 0
    retries: Retries = field(default_factory=Retries)
    timeout_s: float = 3600.0


def make_cell(
    label: str,
    workload: AnyWorkload,
    requirement: Requirement,
    *,
    folder: Path = Path(),
    container: Path | None = None,
    container_sha256: str = "",
    content: str = "",
    conditions: Mapping[str, object] | None = None,
    session: int = 0,
    replica: int = 0,
    spread: bool = False,
    retries: Retries | None = None,
    timeout_s: float = 3600.0,
) -> Cell:
    """A cell with its key.

    Args:
        content: SHA-256 of the files that the workload reads on this host.
        conditions: that its measurement begins under.
        replica: which of several devices of the same requirement.
        spread: whether its replicas go onto different devices.
    """
    what = {
        "container": container_sha256,
        "work": workload.model_dump(mode="json"),
        "content": content,
        "conditions": dict(conditions or {}),
        "requirement": asdict(requirement) | {"tags": sorted(requirement.tags)},
        "replica": replica,
    }
    group = _digest(what)
    return Cell(
        key=_digest({"group": group, "session": session}),
        group=group,
        label=label,
        workload=workload,
        requirement=requirement,
        folder=folder,
        container=container,
        affinity=container_sha256,
        spread=_digest(what | {"replica": None, "session": session}) if spread else "",
        session=session,
        retries=retries or Retries(),
        timeout_s=timeout_s,
    )


def copy_of(cell: Cell, number: int) -> Cell:
    """The same once more, as a cell of its own, for a plan that asks for it again.

    Args:
        number: counted from 1.
    """

    def again(digest: str) -> str:
        return _digest({"of": digest, "copy": number})

    return replace(
        cell,
        key=again(cell.key),
        group=again(cell.group),
        spread=again(cell.spread) if cell.spread else "",
    )


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
