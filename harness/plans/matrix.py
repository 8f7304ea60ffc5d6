"""Matrix of a plan: containers x runtimes x devices x workloads x sessions."""

import fnmatch
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from buildlib.errors import BuildError
from harness.deploy.digests import hash_files
from harness.errors import ConfigFileError, HarnessError, PromptTooLongError, WrongUseError
from harness.plans.cells import Cell, duplicate, make_cell
from harness.plans.lease_requests import meets
from harness.plans.plan_file import ContainerEntry, DeviceSelector, Plan, WorkloadEntry
from harness.pool.requirement import MemberStatus, Requirement
from harness.runtimes.bundles.bundle import pushed_files
from harness.runtimes.registry import DEFAULT_RUNTIME, find_runtime
from harness.workloads.registry import AnyWorkload

MOST_CELLS = 100_000
_LARGEST_TEXT = 256 << 20


Identify = Callable[[Path, str], str]
"""Gives the content hash of a container that a runtime runs."""
Check = Callable[[Path, str, AnyWorkload], None]
"""Raises `PromptTooLongError` or `WrongUseError` where a runtime with a container cannot run it."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """A container, and the runtime that runs it.

    Attributes:
        label: of the container.
        number: of the container in the plan.
    """

    label: str
    runtime: str
    number: int
    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class _DeviceSlot:
    label: str
    requirement: Requirement
    replica: int
    spread: bool


def expand(
    plan: Plan,
    path: Path,
    *,
    identify: Identify,
    members: Callable[[], Sequence[MemberStatus]],
    check: Check = lambda *_: None,
) -> tuple[Cell, ...]:
    """Expand a plan into its cells, in the plan's order.

    Args:
        path: the plan's file; paths in the plan are relative to its folder.
        members: gives the pool's devices; called only if the plan has `count: all`.

    Raises:
        ConfigFileError: a duplicate label, an unreadable file, an incomplete container, a workload
            that its runtime cannot run or that its context is too short for, a match that matches
            nothing, no cells, or far too many.
    """
    return tuple(_Expansion(plan, path, identify, members, check).cells())


def select(cells: Sequence[Cell], patterns: Sequence[str]) -> tuple[Cell, ...]:
    """Select the cells by their labels, or by patterns of them (`*`, `?`, `[...]`)."""
    if not patterns:
        return tuple(cells)
    return tuple(
        cell
        for cell in cells
        if any(cell.label == p or fnmatch.fnmatchcase(cell.label, p) for p in patterns)
    )


@dataclass(frozen=True, slots=True)
class _Expansion:
    plan: Plan
    path: Path
    identify: Identify
    members: Callable[[], Sequence[MemberStatus]]
    check: Check

    def cells(self) -> Iterator[Cell]:
        plan = self.plan
        workloads = [entry.workload for entry in plan.workloads]
        labels = self._labelled("workloads", [e.label or e.workload.kind for e in plan.workloads])
        devices = self._labelled("devices", [d.label or _device_label(d) for d in plan.devices])
        paths = [self._resolve(c.path) for c in plan.containers]
        containers = self._labelled(
            "containers",
            [container_label(self.path, entry) for entry in plan.containers],
        )
        runs_model = any(workload.needs_container for workload in workloads)
        if not paths and runs_model:
            raise self._error("containers", "name containers: a workload of the plan runs a model")
        subjects = list(self._subjects(containers, paths)) if runs_model else []
        pushes = self._pushed()
        contents = [
            self._content(i, workload) + (pushes if workload.needs_container else "")
            for i, workload in enumerate(workloads)
        ]
        slots = [
            list(self._slots(i, label, entry))
            for i, (label, entry) in enumerate(zip(devices, plan.devices, strict=True))
        ]
        combinations = [
            (subject, d, w)
            for w, workload in enumerate(workloads)
            for subject in (subjects if workload.needs_container else [None])
            for d in range(len(devices))
        ]
        names = [
            ((s.label, s.runtime) if s else ("", "")) + (devices[d], labels[w])
            for s, d, w in combinations
        ]
        runs = self._select(names)
        combinations = list(itertools.compress(combinations, runs))
        names = list(itertools.compress(names, runs))
        total = sum(len(slots[d]) * plan.workloads[w].sessions for _, d, w in combinations)
        if not 0 < total <= MOST_CELLS:
            amount = "no cell" if not total else f"{total:,} cells, more than {MOST_CELLS:,}"
            raise self._error("", f"the plan has {amount}")
        self._check_workloads({(s, w): None for s, _, w in combinations if s})
        copies: Counter[str] = Counter()
        for (subject, d, w), name in zip(combinations, names, strict=True):
            groups = set()
            for cell in self._sessions(name, plan.workloads[w], contents[w], subject, slots[d]):
                groups.add(cell.group)
                before = copies[cell.group]
                yield duplicate(cell, before) if before else cell
            copies.update(groups)

    def _subjects(self, labels: Sequence[str], paths: Sequence[Path]) -> Iterator[_Subject]:
        """Yield each container with each runtime of the plan that runs such ones."""
        names = self.plan.runtimes
        idle = set(names)
        for number, path in enumerate(paths):
            own = [name for name in names if find_runtime(name).runs(path)]
            if not own:
                reason = f"{path} is nothing that {' or '.join(names)} can run"
                raise self._error(f"containers[{number}].path", reason)
            for name in own:
                idle.discard(name)
                try:
                    sha256 = self.identify(path, name)
                except (BuildError, WrongUseError) as error:
                    raise self._error(f"containers[{number}].path", str(error)) from error
                yield _Subject(labels[number], name, number, path, sha256)
        for name in sorted(idle):
            raise self._error("runtimes", f"{name} runs none of the plan's containers")

    def _check_workloads(self, pairs: Iterable[tuple[_Subject, int]]) -> None:
        for subject, w in sorted(pairs, key=lambda pair: (pair[0].number, pair[1])):
            workload = self.plan.workloads[w].workload
            name = subject.path.name
            try:
                self.check(subject.path, subject.runtime, workload)
            except PromptTooLongError as error:
                where = f"workloads[{w}].{workload.length_key}"
                raise self._error(where, f"{name}: {error}") from error
            except WrongUseError as error:
                reason = f"{name}: {error}"
                if len(self.plan.runtimes) > 1:
                    label = self.plan.workloads[w].label or workload.kind
                    match = f"{{runtime: {subject.runtime}, workload: {label}}}"
                    reason += f"; `exclude: [{match}]` leaves it out"
                raise self._error(f"workloads[{w}]", reason) from error

    def _sessions(
        self,
        name: tuple[str, str, str, str],
        entry: WorkloadEntry,
        content: str,
        subject: _Subject | None,
        slots: Sequence[_DeviceSlot],
    ) -> Iterator[Cell]:
        for session in range(entry.sessions):
            for slot in slots:
                runtime = name[1] if len(self.plan.runtimes) > 1 else ""
                words = [name[0], runtime, slot.label, name[3]]
                label = "/".join(word for word in words if word)
                yield make_cell(
                    f"{label}#{session + 1}" if entry.sessions > 1 else label,
                    entry.workload,
                    slot.requirement,
                    folder=self.path.parent,
                    container=subject.path if subject else None,
                    runtime=subject.runtime if subject else DEFAULT_RUNTIME,
                    container_sha256=subject.sha256 if subject else "",
                    content=content,
                    conditions=self._conditions(entry.workload),
                    session=session,
                    replica=slot.replica,
                    spread=slot.spread,
                    retries=self.plan.retries,
                    timeout_s=self.plan.timeouts.cell_s,
                )

    def _conditions(self, workload: AnyWorkload) -> Mapping[str, object]:
        conditions = self.plan.conditions
        if conditions == "none" or not workload.under_conditions:
            return {}
        return conditions.model_dump(mode="json")

    def _slots(self, number: int, label: str, entry: DeviceSelector) -> Iterator[_DeviceSlot]:
        requirement = Requirement(
            soc=entry.soc,
            hexagon=entry.hexagon,
            type=entry.type,
            name=entry.name,
            tags=frozenset(entry.tags),
            min_free_bytes=entry.min_free_bytes,
        )
        if entry.count == "all":
            names = sorted(m.name for m in self.members() if meets(requirement, m))
            if not names:
                raise self._error(
                    f"devices[{number}]", f"the pool has no such device: {requirement}"
                )
            for name in names:
                yield _DeviceSlot(
                    f"{label}@{name}", replace(requirement, name=name), 0, spread=False
                )
        elif entry.count == 1:
            yield _DeviceSlot(label, requirement, 0, spread=False)
        else:
            for replica in range(entry.count):
                yield _DeviceSlot(f"{label}@{replica + 1}", requirement, replica, spread=True)

    def _select(self, names: Sequence[tuple[str, str, str, str]]) -> list[bool]:
        """Decide which combinations run: excluded ones do not, unless they are included again."""
        for key, matches in (("exclude", self.plan.exclude), ("include", self.plan.include)):
            for number, match in enumerate(matches):
                if not any(match.matches(*name) for name in names):
                    raise self._error(f"{key}[{number}]", "it matches no combination of the plan")
        return [
            not any(match.matches(*name) for match in self.plan.exclude)
            or any(match.matches(*name) for match in self.plan.include)
            for name in names
        ]

    def _content(self, number: int, workload: AnyWorkload) -> str:
        """Hash the files that a workload reads; empty if it reads none."""
        names = ((key, getattr(workload, key)) for key in workload.input_keys)
        hashes = [
            self._hash(f"workloads[{number}].{key}", name, text=key not in workload.binary_keys)
            for key, name in names
            if name is not None
        ]
        return "+".join(hashes)

    def _pushed(self) -> str:
        """Return names and hashes of the files that go with containers; empty without any."""
        try:
            files = pushed_files(self.plan.push, self.path.parent)
            digests = hash_files(file.path for file in files.values())
        except HarnessError as error:
            raise self._error("push", str(error)) from error
        return "".join(f"+{digests[file.path].sha256} {name}" for name, file in files.items())

    def _hash(self, where: str, name: str, *, text: bool) -> str:
        try:
            with self._resolve(name).open("rb") as source:
                content = source.read(_LARGEST_TEXT + 1)
            if text:
                content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise self._error(where, f"cannot read {self._resolve(name)}: {why}") from error
        if len(content) > _LARGEST_TEXT:
            raise self._error(where, f"{name} is larger than {_LARGEST_TEXT} bytes")
        return hashlib.sha256(content).hexdigest()

    def _labelled(self, key: str, labels: Sequence[str]) -> Sequence[str]:
        """Refuse duplicate labels."""
        counts = Counter(labels)
        for number, label in enumerate(labels):
            if counts[label] > 1:
                where = f"{key}[{number}].label"
                raise self._error(where, f"several have the label {label}: give each its own")
        return labels

    def _resolve(self, path: str) -> Path:
        return resolve_path(self.path, path)

    def _error(self, key: str, reason: str) -> ConfigFileError:
        return ConfigFileError(str(self.path), None, key, reason)


def resolve_path(plan_file: Path, path: str) -> Path:
    """Resolve a path of a plan, which is relative to the plan's folder; without `..`."""
    absolute = (plan_file.parent / Path(path).expanduser()).absolute()
    # A link keeps its own name, which is the label of a container.
    if absolute.name == "..":
        return absolute.resolve()
    return absolute.parent.resolve() / absolute.name


def container_label(plan_file: Path, entry: ContainerEntry) -> str:
    """Return the label of a container of a plan."""
    return entry.label or resolve_path(plan_file, entry.path).name


def cell_as_mapping(cell: Cell) -> Mapping[str, object]:
    """Return a cell in JSON answers."""
    return {
        "cell": cell.label,
        "key": cell.key,
        "kind": cell.workload.kind,
        "container": str(cell.container) if cell.container else None,
        "container_sha256": cell.affinity or None,
        "runtime": cell.runtime if cell.container else None,
        "requirement": str(cell.requirement),
        "session": cell.session,
    }


def _device_label(entry: DeviceSelector) -> str:
    words = [entry.name, entry.soc, entry.hexagon, entry.type, *entry.tags]
    return "+".join(word for word in words if word) or "any"
