"""Builds of the containers that a plan names with build options."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from buildlib.container.container import GenAIContainer
from buildlib.error_base import QnnfarmError, one_line
from buildlib.errors import BuildError, VerificationFailedError
from harness.plans.matrix import container_label, resolve_path
from harness.plans.plan_file import BuildEntry, Plan

if TYPE_CHECKING:
    from buildlib.pipeline.build import Build
    from buildlib.pipeline.runner import StageRecord

OnStage = Callable[[str, "StageRecord"], None]
"""Called with a container's label and each of its stages that ended."""


@dataclass(frozen=True, slots=True)
class ContainerBuild:
    """A container of a plan, as built or as found.

    Attributes:
        label: in the plan.
        sha256: its content hash; empty if there is none, or none that can be read.
        built: whether the plan says how to build it.
        replaced: whether the build replaced what its folder had.
        stages_run: number of stages of the build that did not come from the cache.
        error: why it could not be built, one line; what its folder has is then an older one.
    """

    label: str
    sha256: str = ""
    built: bool = False
    replaced: bool = False
    stages_run: int = 0
    seconds: float = 0.0
    error: str = ""


def build_containers(
    plan: Plan, plan_file: Path, on_stage: OnStage = lambda *_: None
) -> tuple[ContainerBuild, ...]:
    """Build the containers of a plan whose sources, options or compiler have changed.

    The stage cache knows what has: an unchanged one runs no stage, and its folder stays as it is.
    One that cannot be built does not keep the others from it.
    """
    made = []
    for entry in plan.containers:
        label, folder = container_label(plan_file, entry), resolve_path(plan_file, entry.path)
        if entry.build is None:
            made.append(ContainerBuild(label, _content(folder)))
            continue
        start = time.monotonic()
        try:
            made.append(_build(label, folder, entry.build, plan_file, on_stage))
        except (QnnfarmError, OSError, UnicodeError) as error:
            seconds, said = time.monotonic() - start, one_line(str(error), 1000)
            if isinstance(error, OSError):
                said = f"{error.filename or folder}: {error.strerror or said}"
            made.append(
                ContainerBuild(label, _content(folder), built=True, seconds=seconds, error=said)
            )
    return tuple(made)


def without_containers(plan: Plan, plan_file: Path, labels: Collection[str]) -> Plan:
    """Return a plan without the containers of some labels."""
    kept = [entry for entry in plan.containers if container_label(plan_file, entry) not in labels]
    matches = {
        key: tuple(match for match in getattr(plan, key) if match.container not in labels)
        for key in ("exclude", "include")
    }
    return plan.model_copy(update={"containers": tuple(kept), **matches})


def _build(
    label: str, folder: Path, entry: BuildEntry, plan_file: Path, on_stage: OnStage
) -> ContainerBuild:
    from buildlib.container.files import check_replaceable
    from buildlib.container.manifest import is_container
    from buildlib.pipeline.verification import verify_build

    start = time.monotonic()
    check_replaceable(folder, exist_ok=True, may_replace=is_container)  # before a long build
    job = _planned(entry, plan_file)
    container = job.run(lambda record: on_stage(label, record))
    if entry.verify:
        report = verify_build(job, emulator=True)
        if report.failures:
            first = report.failures[0]
            raise VerificationFailedError(entry.target, first.stage, first.subject, first.bound)
    sha256 = container.metadata.container_sha256
    replaced = _content(folder) != sha256
    if replaced:
        container.save(folder, exist_ok=True)
    stages = sum(not record.reused for record in job.records)
    seconds = time.monotonic() - start
    return ContainerBuild(label, sha256, True, replaced, stages, seconds)  # noqa: FBT003


def _planned(entry: BuildEntry, plan_file: Path) -> "Build":
    from buildlib.builder_options import apply_options, flatten_options
    from buildlib.genai import GenAIBuilderFactory

    def path(name: str | None) -> Path | None:
        return None if name is None else resolve_path(plan_file, name)

    calibration = path(entry.calibration)
    builder = GenAIBuilderFactory.create(
        resolve_path(plan_file, entry.model),
        calibration_text=None if calibration is None else calibration.read_text(encoding="utf-8"),
        encodings_path=path(entry.encodings),
    )
    given: dict[str, object] = {
        "arn_cl_options.auto_regression_number": entry.ar,
        "arn_cl_options.context_length": entry.cl,
        "split_model.num_splits": entry.splits,
        "prepare_embedding_lut": entry.embedding_lut,
    }
    if entry.lora is not None:
        given["lora_config.lora_config_path"] = entry.lora
    folder = resolve_path(plan_file, "options").parent
    apply_options(
        builder.set_targets([entry.target]), flatten_options(given | dict(entry.options), folder)
    )
    return builder.plan()


def _content(folder: Path) -> str:
    """Return the content hash of the container in a folder; empty if there is no whole one."""
    try:
        return GenAIContainer.load(folder).metadata.container_sha256
    except BuildError:
        return ""
