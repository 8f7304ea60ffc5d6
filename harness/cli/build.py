"""`qnnfarm build`: builds a container for each target from a model folder.

Builders are imported after the look at finished builds, so that a build with nothing to do takes no
longer than that look.
"""

import contextlib
import json as json_module
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict

from buildlib.builder.options import DEFAULT_CONTEXT, DEFAULT_PREFILL
from buildlib.checkpoint.config import unread_keys
from buildlib.checkpoint.layout import CALIBRATION_TEXT, CONFIG_FILE
from buildlib.errors import ContainerError, InputFileError, VerificationFailedError
from buildlib.sizes import size_text
from buildlib.targets import parse_target
from buildlib.toolchains.base import Toolchain
from buildlib.toolchains.registry import ToolchainName, open_toolchain
from harness.cli.arguments import (
    Json,
    LabDb,
    ReferenceWith,
    absolute,
    read_text,
    with_groups,
)
from harness.cli.completion import complete_recipes, complete_targets
from harness.cli.progress import BuildBar, ModelBar
from harness.console import answers, print_json, print_remark, print_rows
from harness.errors import WrongUseError
from harness.plans.lab import find_lab
from harness.words import pluralize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from buildlib.builder.build import Build
    from buildlib.builder.runner import StageRecord
    from buildlib.builder.stage_graph import StageNode
    from buildlib.container.container import GenAIContainer
    from buildlib.numerics.comparison import VerificationReport
    from harness.plans.builds import BuildRequest

_LARGE = 50_000_000
"""Weights from which on a build takes a while."""


def _model_path(text: str) -> Path:
    """Return the path of a model; absolute after `./`, without which it may look like an id."""
    return Path.cwd() / text if text.startswith("./") else Path(text)


@dataclass(frozen=True)
class BuildSummary:
    """The container of one target, and how many stages ran for it."""

    target: str
    folder: str
    sha256: str
    precision: str | None
    parts: int
    size_bytes: int
    stages_run: int
    stages_reused: int
    seconds: float
    kv_cache_bytes: int | None = None
    loss: dict[str, Any] | None = None

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines on what quantization costs."""
        lines = () if self.loss is None else (*self.loss["remarks"], self.loss["cache_remark"])
        return tuple(filter(None, lines))

    def as_line(self) -> str:
        """Format as a line of text."""
        cached = self.kv_cache_bytes
        cache = "" if cached is None else f"KV cache {size_text(cached)}, "
        kl = "" if self.loss is None else f"KL {self.loss['kl_divergence']:.2g} from float, "
        return (
            f"{self.folder}: {self.target}, {self.precision or 'precision unknown'}, "
            f"{pluralize(self.parts, 'part')}, {size_text(self.size_bytes)}, {cache}{kl}"
            f"{pluralize(self.stages_run, 'stage')} run, {self.stages_reused} from the cache"
        )


@dataclass(frozen=True)
class ToolchainOptions:
    """The compiler of a build."""

    toolchain: Annotated[
        ToolchainName,
        typer.Option(
            help="Compiler: `pypi`, the wheel that is installed with qnnfarm, or "
            "`qairt`, the vendor's SDK (plugins/qairt/qairt.md)."
        ),
    ] = "pypi"
    qairt_sdk: Annotated[
        Path | None,
        typer.Option(
            "--qairt-sdk",
            metavar="DIR",
            help="Folder of an unpacked QAIRT SDK; by default of $QAIRT_SDK_ROOT or "
            "$QNN_SDK_ROOT, or the newest in /opt/qcom/aistack/qairt.",
            show_default=False,
        ),
    ] = None

    def open(self) -> Toolchain:
        """Open the compiler."""
        return open_toolchain(self.toolchain, self.qairt_sdk)


@dataclass(frozen=True)
class ModelOptions:
    """The model, and what is built of it."""

    model_dir: Annotated[
        Path,
        typer.Argument(
            parser=_model_path,
            help="An ONNX export or its folder, with `config.json`, `tokenizer.json` and encodings "
            "beside it; or a checkpoint: a folder in Hugging Face layout, a GGUF file, or an id of "
            "the Hugging Face hub, such as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@REVISION`.",
        ),
    ]
    target: Annotated[
        list[str],
        typer.Option(
            help="SoC to build for: `SM8750` is the phone, `SM8750:emulator` the virtual device. "
            "Can be repeated.",
            autocompletion=complete_targets,
        ),
    ]
    out: Annotated[
        Path,
        typer.Option(help="Folder of the container; with several targets, of one folder each."),
    ]
    ar: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Tokens per graph call: 1 and one prefill length, or several. By default "
            f"1,{DEFAULT_PREFILL}.",
        ),
    ] = None
    cl: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help=f"Context length in tokens, or several. By default {DEFAULT_CONTEXT}.",
        ),
    ] = None
    splits: Annotated[
        int | None,
        typer.Option(
            min=1, help="Parts to cut the model into; by default as many as its size asks for."
        ),
    ] = None
    encodings: Annotated[
        Path | None, typer.Option(help="Encodings of the ONNX, when they do not lie beside it.")
    ] = None
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Text to calibrate on where encodings are missing; by default "
            "text/calibration.txt of the model, else the text that comes with qnnfarm.",
            show_default=False,
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Quantization recipe, such as `w8a16`, `w4a16` or `LPBQ_SeqMSE`; docs/"
            "quantization.md has all, measured.",
            autocompletion=complete_recipes,
        ),
    ] = None
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="Refuse a quantization whose KL divergence from float on the calibration text is "
            "above so many nats.",
            show_default=False,
        ),
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-O",
            metavar="KEY=VALUE",
            help="Any option of the builder by its dotted key, such as "
            "`graphs.vtcm_size_in_mb=4` or `speculative_config.draft_len=4`. Can be repeated.",
        ),
    ] = None
    options_file: Annotated[
        Path | None,
        typer.Option(
            "--options",
            metavar="FILE",
            help="YAML or JSON with such options, its paths relative to its folder. Options of the "
            "command line come before it.",
        ),
    ] = None
    lora: Annotated[
        Path | None,
        typer.Option(help="Adapters to build in: a PEFT folder, or a folder of such folders."),
    ] = None
    embedding_lut: Annotated[
        bool,
        typer.Option(
            "--embedding-lut", help="Leave the embedding to the host, as a table of its own."
        ),
    ] = False
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Run the model before and after each stage, on the emulator too, and refuse a "
            "container whose stages changed it.",
        ),
    ] = False
    reference_with: ReferenceWith = "onnx"

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        return self.model_dir.parent if self.model_dir.is_file() else self.model_dir

    def identity(self, toolchain: ToolchainOptions) -> dict[str, object]:
        """Return all that decides the output of a build, by which finished builds are found."""
        versions = None  # those of the wheel are looked up without loading anything
        if toolchain != ToolchainOptions():
            versions = dict(toolchain.open().versions())
        texts = (self.calibration, self.options_file)
        return {
            **{key: absolute(v) if isinstance(v, Path) else v for key, v in vars(self).items()},
            "folder": absolute(Path()) if self.option else None,  # of relative paths in them
            "texts": [None if path is None else read_text(path) for path in texts],
            "toolchain": versions,
        }

    def requests(self, toolchain: ToolchainOptions) -> "list[tuple[BuildRequest, Path]]":
        """Return the request of each target, and the folder of its container."""
        from buildlib.builder.model_place import find_model
        from buildlib.builder_options import flatten_options, named_options
        from harness.plans.builds import BuildRequest

        model = self.model_dir if self.model_dir.exists() else find_model(self.model_dir).path
        sizes = {
            "ar": _parse_numbers("--ar", self.ar, "1,32"),
            "cl": _parse_numbers("--cl", self.cl, "4096"),
            "embedding_lut": self.embedding_lut or None,
        }
        settings = named_options(vars(self) | sizes)
        settings |= dict(_parse_option(text) for text in self.option or ())
        options = _read_options(self.options_file) | flatten_options(settings, Path.cwd())
        names = dict.fromkeys(str(parse_target(one)) for one in self.target)
        return [
            (
                BuildRequest(
                    model=model,
                    target=name,
                    options=options,
                    encodings=self.encodings,
                    calibration=self.calibration,
                    verify=self.verify,
                    reference_with=self.reference_with,
                    toolchain=toolchain.toolchain,
                    qairt_sdk=toolchain.qairt_sdk,
                ),
                self.out / name.replace(":", "-") if len(names) > 1 else self.out,
            )
            for name in names
        ]


@dataclass(frozen=True)
class LabOptions:
    """The lab that builds."""

    lab: Annotated[
        bool,
        typer.Option(
            "--lab",
            help="Let a worker of a lab build it, and follow it; Ctrl-C leaves it running.",
        ),
    ] = False
    cancel: Annotated[bool, typer.Option("--cancel", help="With --lab: end the build.")] = False
    db: LabDb = None


@with_groups
def build(
    model: ModelOptions,
    toolchain: ToolchainOptions,
    *,
    overwrite: Annotated[
        bool, typer.Option(help="Replace a container that is already there.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the stages and which would run; build nothing."),
    ] = False,
    lab: LabOptions,
    memory: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="GIB",
            help="Memory for stages that run at once; by default two thirds of what is available. "
            "With --lab: of the worker.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Say which keys of config.json the model's code does not read."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Build a container for each target; unchanged stages come from the cache.

    Example: qnnfarm build MODEL_DIR --target SM8750:emulator --out CONTAINER_DIR
    """
    from buildlib.cache.finished_builds import find_finished
    from buildlib.paths import default_cache_root

    began = time.monotonic()
    identity = model.identity(toolchain)
    if lab.cancel and not lab.lab:
        raise WrongUseError("--cancel needs --lab: Ctrl-C ends a build that runs here")
    _check_reference(model)
    if verbose:
        _tell_unread(model.model_dir)
    # A model of the hub may have changed there.
    is_plain = model.model_dir.exists() and not (model.verify or dry_run or lab.lab)
    finished = find_finished(default_cache_root(), identity) if is_plain else None
    if finished is not None:
        summaries = [_again(answer, time.monotonic() - began) for answer in finished.answer]
        _tell_of([(summary, None) for summary in summaries], json=json)
        return
    from buildlib.container.container import check_replaceable

    builds = []
    with ModelBar():  # a GGUF is read here
        for request, folder in model.requests(toolchain):
            job = request.plan()
            job.memory_limit = None if memory is None else int(memory * 2**30)
            if not lab.lab:  # before a long build
                check_replaceable(folder, exist_ok=overwrite)
                _refuse_unwritable(folder, job.weights)
            builds.append((request, job, folder))
    if dry_run:
        _show_stages({one.target: job.stages() for one, job, _ in builds}, json=json)
        return
    if lab.lab:
        _tell_of(_build_in_lab(builds, lab, overwrite=overwrite, json=json), json=json)
        return
    results = []
    for one, job, folder in builds:
        if job.weights > _LARGE:
            _print_line(one.target, _expected(job))
        with BuildBar(one.target) as progress:
            container, report = one.run(
                job,
                folder,
                overwrite=overwrite,
                on_stage=progress.show,
                on_comparison=progress.compared,
            )
        if report is not None and not json:
            from harness.workloads.verify import print_report

            print_report(report)
        results.append((_summary(one.target, container, job.records), report))
    if is_plain:
        folders = [(job, folder) for _, job, folder in builds]
        _remember(identity, model.folder.absolute(), folders, results)
    _tell_of(results, json=json)


def _build_in_lab(
    builds: "Sequence[tuple[BuildRequest, Build, Path]]",
    lab: LabOptions,
    *,
    overwrite: bool,
    json: bool,
) -> "list[tuple[BuildSummary, VerificationReport | None]]":
    """Submit builds to a lab, follow them and fetch their containers, or cancel them."""
    open_lab = find_lab()
    if lab.db is None:
        raise WrongUseError("--lab: name the lab's database by --db or $QNNFARM_LAB")
    results: list[tuple[BuildSummary, VerificationReport | None]] = []
    with open_lab(lab.db) as opened:
        if lab.cancel:
            count = opened.cancel(builds)
            answers().print(f"{pluralize(count, 'build')} cancelled")
            raise typer.Exit

        def hear(answer: "Mapping[str, Any]") -> None:
            """Tell of a verification, which is all that one which failed has."""
            summary, report = _read_answer(answer)
            if report is not None and not json:
                from harness.workloads.verify import print_report

                print_report(report)
            elif report is not None and report.failures:
                print_json([_answer(*one) for one in (*results, (summary, report))])

        try:
            found = opened.build(builds, overwrite=overwrite, tell=_print_line, hear=hear)
            for (one, _, folder), (answer, host, new) in zip(builds, found, strict=True):
                _print_line(one.target, f"{'built by' if new else 'built before by'} {host}")
                summary, report = _read_answer({**answer, "folder": str(folder)})
                results.append((summary if new else _again(asdict(summary), 0), report))
        except KeyboardInterrupt:
            print_remark("the build goes on: the same command follows it, --cancel ends it")
            raise
    return results


def _expected(job: "Build") -> str:
    """Say what a build of a large model takes."""
    minutes, memory = max(1, round(job.seconds / 60)), job.memory_bytes / 2**30
    return (
        f"about {minutes} min on two idle cores, less what is in the cache, and at its peak "
        f"{memory:.1f} GiB of memory"
    )


def _print_line(target: str, words: str) -> None:
    print_remark(f"{target}: {words}")


def _show_stages(stages: "Mapping[str, Sequence[StageNode]]", *, json: bool) -> None:
    """Print the stages of each target's build, and whether the cache has them."""
    keys = ("target", "stage", "graph", "state")
    rows = [
        [target, node.stage.operation, node.stage.subject, "cached" if node.is_made else "to run"]
        for target, nodes in stages.items()
        for node in nodes
    ]
    if json:
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
        return
    print_rows(keys, rows)
    if any(nodes[-1].stage.operation != "package" for nodes in stages.values()):
        print_remark("more stages follow, which depend on what these make")


def _check_reference(model: ModelOptions) -> None:
    if model.reference_with != "transformers":
        return
    from buildlib.builder.model_place import find_model
    from buildlib.numerics.transformers import require_family

    if not model.verify:
        raise WrongUseError("--reference-with transformers needs --verify")
    require_family(find_model(model.model_dir).folder)  # before a long build


def _tell_unread(model_dir: Path) -> None:
    """Print keys of a model's configuration that do nothing, if there are such."""
    from buildlib.builder.model_place import find_model

    folder = find_model(model_dir).folder
    if (folder / CONFIG_FILE).is_file():
        model, unread = unread_keys(folder / CONFIG_FILE)
        if unread:
            print_remark(f"not read by {model}: {', '.join(unread)}")


def _remember(
    request: "Mapping[str, object]",
    parent: Path,
    builds: "Sequence[tuple[Build, Path]]",
    results: "Sequence[tuple[BuildSummary, VerificationReport | None]]",
) -> None:
    """Keep the inputs and the outputs of a build, if they are known."""
    from buildlib.cache.finished_builds import FinishedBuild, remember_finished
    from buildlib.paths import default_cache_root

    inputs: list[Path] = []
    for job, _ in builds:
        if job.inputs is None:
            return
        inputs += job.inputs
    root = default_cache_root()
    with contextlib.suppress(InputFileError):
        build_ = FinishedBuild.of(
            root,
            inputs,
            [parent, (parent / CALIBRATION_TEXT).parent],
            [folder.absolute() for _, folder in builds],
            [record.entry for job, _ in builds for record in job.records],
            [asdict(summary) for summary, _ in results],
        )
        remember_finished(root, request, build_)


def _again(answer: dict[str, Any], seconds: float) -> BuildSummary:
    """Return the summary of a build that had nothing to do."""
    stages = answer["stages_run"] + answer["stages_reused"]
    counts = {"stages_run": 0, "stages_reused": stages, "seconds": round(seconds, 3)}
    return BuildSummary(**answer | counts)


def _tell_of(
    results: "Sequence[tuple[BuildSummary, VerificationReport | None]]", *, json: bool
) -> None:
    """Print a summary of a build."""
    if json:
        print_json([_answer(summary, report) for summary, report in results])
    for summary, report in results:
        if report is not None and report.failures:
            first = report.failures[0]
            raise VerificationFailedError(summary.target, first.side, first.where, first.bound)
        if not json:
            answers().print(summary.as_line())
            for remark in summary.remarks:
                print_remark(remark)


def _refuse_unwritable(folder: Path, size: int) -> None:
    """Check that a container of `size` bytes can be written to a folder; leave nothing there."""
    from buildlib.paths import user_path

    parents = user_path(folder).absolute().parents
    there = next(parent for parent in parents if parent.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=there):
            pass
    except OSError as error:
        raise ContainerError(str(folder), f"cannot be written ({error.strerror})") from error
    free = shutil.disk_usage(there).free
    if free < size and not folder.exists():
        sizes = f"about {size >> 20:,} MiB are needed and {free >> 20:,} MiB free"
        raise ContainerError(str(folder), f"{sizes}; free some, or name another folder")


def _answer(summary: BuildSummary, report: "VerificationReport | None") -> dict[str, object]:
    verification = {} if report is None else {"verification": report.as_document()}
    return asdict(summary) | verification


def _read_answer(answer: "Mapping[str, Any]") -> "tuple[BuildSummary, VerificationReport | None]":
    """Read an answer of another host's `_answer`."""
    from buildlib.numerics.comparison import VerificationReport

    verification = answer.get("verification")
    summary = BuildSummary(**{key: answer[key] for key in answer if key != "verification"})
    return summary, None if verification is None else VerificationReport.of(verification)


def _summary(
    target: str, container: "GenAIContainer", records: list["StageRecord"]
) -> BuildSummary:
    loss = container.metadata.loss
    return BuildSummary(
        target=target,
        folder=str(container.path),
        sha256=container.metadata.container_sha256,
        precision=container.precision,
        parts=container.metadata.graphs.splits,
        size_bytes=container.metadata.size_bytes,
        stages_run=sum(not record.reused for record in records),
        stages_reused=sum(record.reused for record in records),
        seconds=round(sum(record.seconds for record in records), 3),
        kv_cache_bytes=container.kv_cache_bytes,
        loss=None if loss is None else loss.model_dump(mode="json"),
    )


class _OptionsFile(BaseModel):
    """Mapping of options, which `buildlib.builder_options` checks."""

    model_config = ConfigDict(extra="allow")


def _read_options(path: Path | None) -> dict[str, object]:
    """Read `--options`: dotted keys and absolute paths."""
    from buildlib.builder_options import flatten_options
    from harness.yaml_files import YamlFile

    if path is None:
        return {}
    file = YamlFile.load(path, _OptionsFile)
    return flatten_options(file.content.model_extra or {}, path.absolute().parent)


def _parse_numbers(option: str, text: str | None, example: str) -> list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        reason = "takes whole numbers from 1 with commas between"
        raise WrongUseError(f"{option} {reason}, such as {example}, not {text!r}")
    return numbers


def _parse_option(text: str) -> tuple[str, object]:
    """Parse `KEY=VALUE`; the value is JSON, or else text."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise WrongUseError(f"--option takes KEY=VALUE, not {text!r}")
    try:
        return key, json_module.loads(value)
    except ValueError:
        return key, value
