"""Builds of containers, here or on a host of a lab, and of all those that a plan names."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from buildlib.builder.calibration_text import read_text
from buildlib.container.container import GenAIContainer, check_replaceable
from buildlib.error_base import QnnfarmError, one_line
from buildlib.errors import BuildError, VerificationFailedError
from buildlib.toolchains.registry import ToolchainName, open_toolchain
from harness.plans.matrix import container_label, resolve_path
from harness.plans.plan_file import BuildEntry, Plan

if TYPE_CHECKING:
    from buildlib.builder.build import Build
    from buildlib.builder.runner import StageRecord
    from buildlib.numerics.comparison import SideComparison, VerificationReport


class BuildRequest(BaseModel):
    """A container to build: the arguments of `qnnfarm build` for one target.

    Attributes:
        model: an ONNX export, or the folder of one or of a checkpoint.
        options: options of the builder by their dotted keys, with absolute paths.
        calibration: file with the text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    target: str
    options: Mapping[str, object] = {}
    encodings: Path | None = None
    calibration: Path | None = None
    verify: bool = False
    reference_with: Literal["onnx", "transformers"] = "onnx"
    toolchain: ToolchainName = "pypi"
    qairt_sdk: Path | None = None

    @classmethod
    def of(cls, entry: BuildEntry, plan_file: Path) -> "BuildRequest":
        """Return the request of a plan."""
        from buildlib.builder_options import flatten_options, named_options

        def path(name: str | None) -> Path | None:
            return None if name is None else resolve_path(plan_file, name)

        options = named_options(dict(entry)) | dict(entry.options)
        return cls(
            model=resolve_path(plan_file, entry.model),
            target=entry.target,
            options=flatten_options(options, resolve_path(plan_file, "options").parent),
            encodings=path(entry.encodings),
            calibration=path(entry.calibration),
            verify=entry.verify,
            toolchain=entry.toolchain,
            qairt_sdk=path(entry.qairt_sdk),
        )

    def plan(self) -> "Build":
        """Check it, and return the build that it asks for."""
        from buildlib.builder_options import apply_options
        from buildlib.genai import GenAIBuilderFactory

        builder = GenAIBuilderFactory.create(
            self.model,
            calibration_text=None if self.calibration is None else read_text(self.calibration),
            encodings_path=self.encodings,
            toolchain=open_toolchain(self.toolchain, self.qairt_sdk),
        )
        apply_options(builder.set_targets([self.target]), self.options)
        return builder.plan()

    def run(
        self,
        job: "Build",
        folder: Path,
        *,
        overwrite: bool,
        on_stage: "Callable[[StageRecord], None] | None" = None,
        on_comparison: "Callable[[SideComparison], None]" = lambda _: None,
    ) -> "tuple[GenAIContainer, VerificationReport | None]":
        """Run its build, and place the container in a folder, unless a stage changed the model.

        Args:
            job: as `plan` returned it.

        Returns:
            The container, in the cache if it was not placed, and the comparison of its stages.
        """
        from buildlib.builder.verification import verify_build

        container = job.run(on_stage)
        report = None
        if self.verify:
            report = verify_build(
                job,
                emulator=True,
                reference_with=self.reference_with,
                on_comparison=on_comparison,
            )
        if report is None or report.passed:
            container = container.save(folder, exist_ok=overwrite)
        return container, report


Tell = Callable[[str], None]
PlannedBuild = tuple[BuildRequest, "Build", Path]
"""A request, what it plans, and the folder of its container."""
BuildContainer = Callable[[BuildRequest, Path, Tell], tuple[str, int]]
"""Builds a container into a folder, and tells its stages; returns its hash and how many ran."""


@dataclass(frozen=True, slots=True)
class ContainerBuild:
    """A container of a plan, as built or as found.

    Attributes:
        label: in the plan.
        sha256: its content hash; empty if there is none, or none that can be read.
        built: whether the plan says how to build it.
        replaced: whether the build replaced the content of its folder.
        stages_run: number of stages of the build that did not come from the cache.
        error: why it could not be built, one line; its folder then has an older container.
    """

    label: str
    sha256: str = ""
    built: bool = False
    replaced: bool = False
    stages_run: int = 0
    seconds: float = 0.0
    error: str = ""


def build_containers(
    plan: Plan,
    plan_file: Path,
    on_progress: Tell = lambda _: None,
    build: BuildContainer | None = None,
) -> tuple[ContainerBuild, ...]:
    """Build the containers of a plan with changed sources, options or compiler.

    The stage cache tells: an unchanged one runs no stage, and its folder stays as it is. One that
    cannot be built does not keep the others from it.

    Args:
        on_progress: called with a line for each stage that ran.
        build: builds them elsewhere than here.
    """
    build = build or _build_here
    builds = []
    for entry in plan.containers:
        label, folder = container_label(plan_file, entry), resolve_path(plan_file, entry.path)
        if entry.build is None:
            builds.append(ContainerBuild(label, _content(folder)))
            continue
        start = time.monotonic()
        try:
            before = _content(folder)
            request = BuildRequest.of(entry.build, plan_file)
            check_replaceable(folder, exist_ok=True)  # before a build
            sha256, stages = build(request, folder, partial(_tell_stage, on_progress, label))
            seconds, replaced = time.monotonic() - start, before != sha256
            builds.append(ContainerBuild(label, sha256, True, replaced, stages, seconds))  # noqa: FBT003
        except (QnnfarmError, OSError, UnicodeError) as error:
            seconds, reason = time.monotonic() - start, one_line(str(error), 1000)
            if isinstance(error, OSError):
                reason = f"{error.filename or folder}: {error.strerror or reason}"
            builds.append(
                ContainerBuild(label, _content(folder), built=True, seconds=seconds, error=reason)
            )
    return tuple(builds)


def planned_builds(plan: Plan, plan_file: Path) -> "Iterator[PlannedBuild]":
    """Yield the builds of a plan; of those that cannot begin, `build_containers` tells."""
    for entry in plan.containers:
        if entry.build is not None:
            with contextlib.suppress(QnnfarmError):
                folder = resolve_path(plan_file, entry.path)
                request = BuildRequest.of(entry.build, plan_file)
                yield request, request.plan(), folder


def without_containers(plan: Plan, plan_file: Path, labels: Collection[str]) -> Plan:
    """Return a plan without the containers of some labels."""
    others = [e for e in plan.containers if container_label(plan_file, e) not in labels]
    matches = {
        key: tuple(match for match in getattr(plan, key) if match.container not in labels)
        for key in ("exclude", "include")
    }
    return plan.model_copy(update={"containers": tuple(others), **matches})


def _tell_stage(tell: Tell, label: str, words: str) -> None:
    tell(f"build {label}: {words}")


def _build_here(request: BuildRequest, folder: Path, tell: Tell) -> tuple[str, int]:
    def show(record: "StageRecord") -> None:
        if not record.reused:
            tell(f"{record.operation} {record.subject} ({record.seconds:.1f} s)")

    job = request.plan()
    container, report = request.run(job, folder, overwrite=True, on_stage=show)
    if report is not None and report.failures:
        first = report.failures[0]
        raise VerificationFailedError(request.target, first.side, first.where, first.bound)
    stages = sum(not record.reused for record in job.records)
    return container.metadata.container_sha256, stages


def _content(folder: Path) -> str:
    """Return the content hash of the container in a folder; empty if there is no whole one."""
    try:
        return GenAIContainer.load(folder).metadata.container_sha256
    except BuildError:
        return ""
