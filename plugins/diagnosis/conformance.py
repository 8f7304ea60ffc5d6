"""`qnnfarm conformance`: one run that proves a toolchain and a device, and a report of it."""

import dataclasses
import json as json_module
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar, runtime_checkable

import typer
from rich.text import Text

from buildlib.checkpoint.layout import CALIBRATION_TEXT
from buildlib.container.container import GenAIContainer
from buildlib.error_base import QnnfarmError
from buildlib.genai import GenAIBuilderFactory
from buildlib.targets import find_soc
from buildlib.toolchains.base import BinaryInfo, Toolchain
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.toolchains.registry import open_toolchain
from harness.cli.arguments import (
    WAIT_S,
    Json,
    Wait,
    read_text,
    with_groups,
    write_file,
)
from harness.cli.build import ToolchainOptions
from harness.cli.completion import complete_devices, complete_socs
from harness.cli.device_lease import lease_device, virtual_device
from harness.console import answers, print_json, print_remark
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import BAD, HostFileError
from harness.results.provenance import own_version
from harness.runtimes.base import Generates, GenerationRequest, GenerationResult
from harness.runtimes.bundles.sources import find_python
from harness.runtimes.registry import open_model
from harness.words import pluralize
from harness.workloads.bench_prompt import cut_prompt
from harness.workloads.perplexity import score_text
from harness.workloads.session import Session
from plugins.diagnosis.rehearse import check_bundle, prompt_lengths, without_spill

Mark = Literal["proven here", "proven there", "open", "failed"]
"""Here is PyPI's compiler and the emulator; there is the SDK, or hardware."""
_COLOURS: Mapping[Mark, str] = {
    "proven here": "green", "proven there": "green", "open": "yellow", "failed": "red",
}  # fmt: skip
_ANDROID = "arm64-v8a"
_WINDOWS = 2
"""Of the text whose perplexity is compared."""
_PERPLEXITY_BOUND = 0.03
"""Most relative difference from the emulator: where W8A16 itself may be from float."""
_NOT_DRIVEN = (
    ("native KV", "the builder of qairt-dev has it (80-87189-2), no documented command line does"),
    (
        "LoRA v2",
        (
            "sections are made by qairt-lora-importer and --adapter_weight_config, whose files no "
            "public document describes whole; adapters are built as inputs (LoRA v1)"
        ),
    ),
    (
        "GenAiTransformer",
        (
            "qnn-genai-transformer-composer makes its model.bin from a checkpoint; no command here "
            "calls it, nor configures Genie for that backend"
        ),
    ),
    ("LPBQ, odd widths", "32 must divide the inputs, as PyPI's compiler needs it; nobody tried"),
    ("op packages", "qairt-converter wants --op_package_config, which is not written here"),
)


@runtime_checkable
class _Describer(Toolchain, Protocol):
    """A toolchain with a reader of binaries of its own, as the SDK's is."""

    def description(self, binary: Path) -> Mapping[str, Any]:
        """Return what its program says of a context binary."""


@dataclass(frozen=True)
class Proof:
    """A check, its place, and its finding."""

    subject: str
    mark: Mark
    detail: str


_Value = TypeVar("_Value")


class _Refuted(Exception):  # noqa: N818  (a finding)
    """A check that failed, with its finding."""


@with_groups
def conformance(
    model_dir: Annotated[
        Path, typer.Argument(help="A checkpoint or export, such as suites/models/tiny_llama.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the containers and of the report.")],
    *,
    toolchain: ToolchainOptions,
    device: Annotated[
        str | None,
        typer.Option(
            help="The phone or board; by default a virtual device.", autocompletion=complete_devices
        ),
    ] = None,
    soc: Annotated[
        str, typer.Option(help="SoC of the virtual device.", autocompletion=complete_socs)
    ] = "SM8750",
    ar: Annotated[int, typer.Option(min=2, help="Tokens of a prefill call.")] = 32,
    cl: Annotated[int, typer.Option(min=4, help="Context length in tokens.")] = 192,
    prompts: Annotated[int, typer.Option(min=1, max=1000, help="Prompts of each runtime.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 16,
    text: Annotated[
        Path | None,
        typer.Option(help="Text for the perplexity; by default text/calibration.txt of the model."),
    ] = None,
    wait: Wait = WAIT_S,
    json: Json = False,
) -> None:
    """Build, push and run a model, and write all proofs into a report for an issue.

    Each check is proven here (by PyPI's compiler and the emulator), proven there (by the SDK, or on
    a phone), open, or failed. Tokens and perplexity must be those of PyPI's container on the
    emulator.

    Example: qnnfarm conformance MODEL_DIR --out conformance --toolchain qairt
    """
    compiler = toolchain.open()
    GenAIBuilderFactory.create(model_dir)  # before a device is leased
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostFileError(str(out), error.strerror or str(error)) from error
    properties = None
    if device is not None:
        with lease_device(device, wait_s=wait, purpose="conformance") as phone:
            properties = phone.properties()
        soc = properties.soc
    if text is None and (model_dir / CALIBRATION_TEXT).is_file():
        text = model_dir / CALIBRATION_TEXT
    content = None if text is None else read_text(text)
    soc, proofs = find_soc(soc).name, _Proofs(toolchain.toolchain == "qairt")
    reference = None
    containers = proofs.prove(
        "build", lambda: _Containers.build(model_dir, out, compiler, soc, (ar, cl))
    )
    if containers is not None:
        lengths = prompt_lengths(containers.reference, prompts, max_tokens)
        questions = _Prompts(lengths, max_tokens, content)
        _prove_host(proofs, containers, compiler)
        proofs.there = False
        reference = proofs.prove("emulator", lambda: _ask_emulator(containers, questions))
        if reference is not None and containers.unshared is not containers.reference:
            proofs.there = True
            proofs.prove("SDK on emulator", lambda: _ask_again(containers, questions, reference))
        if reference is not None:
            where = (
                virtual_device(containers.reference)
                if device is None
                else lease_device(device, wait_s=wait, purpose="conformance")
            )
            proofs.there = properties is not None and not properties.emulator
            proofs.prove(
                "device",
                lambda: _prove_device(proofs, where, containers, questions, reference, out),
            )
    for subject, why in _NOT_DRIVEN:
        proofs.open(subject, why)
    report = _report(proofs.made, model_dir, compiler, soc, properties, reference)
    write_file(out / "conformance.json", json_module.dumps(report, indent=2).encode())
    write_file(out / "conformance.md", _markdown(report, proofs.made).encode())
    if json:
        print_json(report)
    else:
        for proof in proofs.made:
            mark = Text(f"{proof.mark:13}", _COLOURS[proof.mark])
            answers().print(mark, Text(f"{proof.subject:16}", "bold"), Text(proof.detail))
        answers().print(f"report: {out / 'conformance.md'}")
    if any(proof.mark == "failed" for proof in proofs.made):
        raise typer.Exit(BAD)


@dataclass
class _Proofs:
    """Checks of one run, in order.

    Attributes:
        there: whether the checks that follow are made by the SDK, or on hardware.
    """

    there: bool
    made: list[Proof] = field(default_factory=list)

    def prove(self, subject: str, check: Callable[[], tuple[str, _Value]]) -> _Value | None:
        """Make a check, which returns its detail and a value; an error of ours is its failure."""
        print_remark(subject)
        try:
            detail, value = check()
        except (QnnfarmError, _Refuted) as error:
            self.made.append(Proof(subject, "failed", str(error)))
            return None
        self.made.append(Proof(subject, "proven there" if self.there else "proven here", detail))
        return value

    def open(self, subject: str, why: str) -> None:
        self.made.append(Proof(subject, "open", why))


@dataclass(frozen=True)
class _Prompts:
    """Prompts of these lengths, the most tokens of an answer, and a text to score, if any."""

    lengths: Sequence[int]
    max_tokens: int
    text: str | None

    def ask(
        self, device: Device, container: GenAIContainer, runtime: str
    ) -> list[GenerationResult]:
        """Let a runtime answer the prompts, greedily."""
        tokens = cut_prompt(container.files["tokenizer.json"], max(self.lengths)).token_ids
        requests = [
            GenerationRequest(self.max_tokens, token_ids=tokens[:length]) for length in self.lengths
        ]
        with Session(device, open_model(container.path, runtime)) as session:
            return [session.require(Generates).generate(request) for request in requests]

    def score(self, device: Device, container: GenAIContainer) -> float | None:
        if self.text is None:
            return None
        with Session(device, open_model(container.path, "genie")) as session:
            return score_text(session, self.text, windows=_WINDOWS).output.perplexity


@dataclass(frozen=True)
class _Expected:
    """Answers and perplexity of PyPI's container on the emulator."""

    results: list[GenerationResult]
    perplexity: float | None


@dataclass(frozen=True)
class _Containers:
    """Of one model: with shared weights, without, and as PyPI's toolchain builds the latter."""

    shared: GenAIContainer
    unshared: GenAIContainer
    reference: GenAIContainer

    @classmethod
    def build(
        cls, model: Path, out: Path, compiler: Toolchain, soc: str, shape: tuple[int, int]
    ) -> tuple[str, Self]:
        def container(target: str, by: Toolchain) -> GenAIContainer:
            builder = GenAIBuilderFactory.create(model, toolchain=by, cache_root=out / "cache")
            lengths = {"auto_regression_number": (1, shape[0]), "context_length": (shape[1],)}
            options = {f"arn_cl_options.{key}": value for key, value in lengths.items()}
            builder.set_targets([target]).set_transformation_options(options)
            folder = out / f"{by.name}-{target.replace(':', '-')}"
            return builder.build().save(folder, exist_ok=True)

        emulator = f"{soc}:emulator"
        shared, unshared = container(soc, compiler), container(emulator, compiler)
        pypi = open_toolchain("pypi")
        by_sdk = compiler.name != pypi.name
        reference = container(emulator, pypi) if by_sdk else unshared
        parts = pluralize(len(shared.binaries), "binary")
        return f"{parts} for {soc}, as many for its emulator", cls(shared, unshared, reference)

    def compare_graphs(self) -> tuple[str, bool]:
        """Hold the graphs against those that PyPI's compiler makes."""
        references = {g.name: without_spill(g) for i in _infos(self.reference) for g in i.graphs}
        graphs = [without_spill(graph) for info in _infos(self.shared) for graph in info.graphs]
        if names := {graph.name for graph in graphs} ^ references.keys():
            raise _Refuted(f"only one of both toolchains makes {', '.join(sorted(names))}")
        tensors = 0
        for graph in graphs:
            other = references[graph.name]
            ours, theirs = (
                {t.name: t for t in (*one.inputs, *one.outputs)} for one in (graph, other)
            )
            names = {name for name in ours | theirs if ours.get(name) != theirs.get(name)}
            if names:
                first = min(names)
                reason = f"{ours.get(first)}, and by PyPI's {theirs.get(first)}"
                raise _Refuted(f"{graph.name}: {pluralize(len(names), 'tensor')} differ: {reason}")
            if graph.vtcm_mb != other.vtcm_mb:
                raise _Refuted(f"{graph.name}: {graph.vtcm_mb} MiB of VTCM, not {other.vtcm_mb}")
            tensors += len(ours)
        return f"{tensors} inputs and outputs have PyPI's names, shapes, types and encodings", True

    def compare_sizes(self) -> tuple[str, bool]:
        both = (self.shared, self.unshared)
        shared, unshared = (sum(p.stat().st_size for p in one.binaries.values()) for one in both)
        detail = f"{shared:,} bytes, and {unshared:,} without"
        if shared >= unshared:
            raise _Refuted(f"it saves nothing: {detail}")
        return detail, True

    def read_twice(self, compiler: _Describer) -> tuple[str, bool]:
        """Compare our description of each binary with that of the SDK's own program."""
        for path in self.shared.binaries.values():
            ours = {
                graph.name: {t.name: t.shape for t in (*graph.inputs, *graph.outputs)}
                for graph in compiler.inspect(path).graphs
            }
            theirs = _graphs_of(compiler.description(path))
            if ours != theirs:
                raise _Refuted(f"{path.name}: we read {sorted(ours)}, and it {sorted(theirs)}")
        return "qnn-context-binary-utility reads our graphs, tensors and shapes, too", True


def _prove_host(proofs: _Proofs, containers: _Containers, compiler: Toolchain) -> None:
    proofs.prove("graphs", containers.compare_graphs)
    proofs.prove("weight sharing", containers.compare_sizes)
    if isinstance(compiler, _Describer):
        proofs.prove("second reader", lambda: containers.read_twice(compiler))
    else:
        for subject in ("second reader", "SDK on emulator"):
            proofs.open(subject, "its programs come with the SDK")


def _ask_emulator(containers: _Containers, prompts: _Prompts) -> tuple[str, _Expected]:
    with virtual_device(containers.reference) as device:
        results = prompts.ask(device, containers.reference, "genie")
        perplexity = prompts.score(device, containers.reference)
    return f"answers {pluralize(len(results), 'prompt')}", _Expected(results, perplexity)


def _ask_again(
    containers: _Containers, prompts: _Prompts, expected: _Expected
) -> tuple[str, object]:
    """Ask the SDK's container for the emulator."""
    with virtual_device(containers.unshared) as device:
        return _compare(prompts.ask(device, containers.unshared, "genie"), expected.results)


def _prove_device(
    proofs: _Proofs,
    where: AbstractContextManager[Device],
    containers: _Containers,
    prompts: _Prompts,
    expected: _Expected,
    out: Path,
) -> tuple[str, bool]:
    """Run a container on a device by each runtime, and hold it against the emulator."""
    with where as device:
        properties = device.properties()
        container = containers.unshared if properties.emulator else containers.shared

        def answer() -> tuple[str, list[GenerationResult]]:
            results = prompts.ask(device, container, "genie")
            return f"answers {pluralize(len(results), 'prompt')}", results

        def compare_graphs() -> tuple[str, object]:
            return _compare(prompts.ask(device, container, "graph"), expected.results)

        def score() -> tuple[str, bool]:
            return _compare_scores(prompts.score(device, container), expected.perplexity)

        proofs.prove("bundle", lambda: _check_bundle(container, properties))
        results = proofs.prove("Genie", answer)
        if results is not None:
            proofs.prove("profiles", lambda: _check_profiles(results, out / "profiles"))
            proofs.prove("tokens", lambda: _compare(results, expected.results))
        if properties.abi == _ANDROID and not find_python(properties.abi):
            for subject in ("graph runtime", "perplexity"):
                proofs.open(subject, "a phone needs Python for it: QNNFARM_PYTHON names one")
        else:
            proofs.prove("graph runtime", compare_graphs)
            if expected.perplexity is None:
                proofs.open("perplexity", "there is no text: give --text")
            else:
                proofs.prove("perplexity", score)
    return f"{properties.model}, {properties.system}, {properties.soc}", True


def _infos(container: GenAIContainer) -> Iterable[BinaryInfo]:
    return map(OrtQnnToolchain().inspect, container.binaries.values())


def _graphs_of(description: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Read graphs from the JSON of `qnn-context-binary-utility`.

    Source of its form: ONNX Runtime's `gen_qnn_ctx_onnx_model.py` (MIT).
    """
    try:
        return {
            graph["info"]["graphName"]: {
                tensor["info"]["name"]: tuple(tensor["info"]["dimensions"])
                for kind in ("graphInputs", "graphOutputs")
                for tensor in graph["info"][kind]
            }
            for graph in description["info"]["graphs"]
        }
    except (KeyError, TypeError) as error:
        reason = f"its JSON has another form than is documented: {error!r}"
        raise _Refuted(reason) from error


def _compare(
    results: list[GenerationResult], expected: Sequence[GenerationResult]
) -> tuple[str, list[GenerationResult]]:
    """Compare tokens, or texts where a runner tells no tokens."""
    for number, (ours, theirs) in enumerate(zip(results, expected, strict=True), 1):
        pair: tuple[Sequence[object], Sequence[object]] = (ours.text, theirs.text)
        if ours.token_ids is not None and theirs.token_ids is not None:
            pair = (list(ours.token_ids), list(theirs.token_ids))
        if pair[0] != pair[1]:
            raise _Refuted(f"prompt {number}: {pair[0]!r}, and the emulator {pair[1]!r}")
    return f"{len(results)} of {len(expected)} answers are those of the emulator", results


def _compare_scores(perplexity: float | None, expected: float | None) -> tuple[str, bool]:
    if perplexity is None or expected is None:
        raise _Refuted("nothing was scored")
    detail = f"{perplexity:.4f}, and {expected:.4f} by PyPI's compiler on the emulator"
    if abs(perplexity / expected - 1) > _PERPLEXITY_BOUND:
        raise _Refuted(f"{detail}: more than {_PERPLEXITY_BOUND:.0%} apart")
    return detail, True


def _check_bundle(container: GenAIContainer, properties: DeviceProperties) -> tuple[str, bool]:
    check = check_bundle(container, properties.abi)
    if not check.holds:
        raise _Refuted(check.detail)
    return check.detail, True


def _check_profiles(results: Sequence[GenerationResult], folder: Path) -> tuple[str, bool]:
    """Keep Genie's profiles, each of which must have its rates."""
    folder.mkdir(exist_ok=True)
    for number, result in enumerate(results, 1):
        (folder / f"{number}.json").write_text(result.profile, encoding="utf-8")
        if not {"prefill_tokens_per_s", "decode_tokens_per_s"} <= result.metrics.keys():
            raise _Refuted(f"that of prompt {number} has {', '.join(sorted(result.metrics))}")
    return f"{folder.name}/ has {len(results)}, with prefill and decode rates", True


def _report(
    proofs: Sequence[Proof],
    model: Path,
    compiler: Toolchain,
    soc: str,
    properties: DeviceProperties | None,
    expected: _Expected | None,
) -> dict[str, Any]:
    return {
        "qnnfarm": own_version(),
        "toolchain": dict(compiler.versions()),
        "model": model.name,
        "soc": soc,
        "device": "virtual" if properties is None else dataclasses.asdict(properties),
        "checks": [dataclasses.asdict(proof) for proof in proofs],
        "tokens": [] if expected is None else [one.token_ids for one in expected.results],
    }


def _markdown(report: Mapping[str, Any], proofs: Sequence[Proof]) -> str:
    device = report["device"]
    device_name = device if isinstance(device, str) else f"{device['model']}, {device['build']}"
    versions = ", ".join(f"{key} {value}" for key, value in report["toolchain"].items())
    rows = "".join(
        f"| {proof.subject} | {proof.mark} | {proof.detail.replace('|', '/')} |\n"
        for proof in proofs
    )
    return (
        f"# Conformance of {report['toolchain'].get('toolchain')} on {report['soc']}\n\n"
        f"- toolchain: {versions}\n- device: {device_name}\n- model: {report['model']}\n"
        f"- qnnfarm: {report['qnnfarm']}\n\n"
        f"| check | mark | detail |\n| --- | --- | --- |\n{rows}"
    )
