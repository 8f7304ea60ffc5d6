"""`qnnfarm rehearse`: all that can be proven about a phone's container without the phone."""

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from buildlib.container.container import GenAIContainer
from buildlib.container.manifest import GENIE_CONTRACT
from buildlib.replay import emulator_twin
from buildlib.toolchains.base import GraphInfo
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from harness.cli.arguments import CacheDir, ContainerDir, Json
from harness.cli.completion import complete_devices
from harness.cli.device_lease import virtual_device
from harness.console import answers, print_json, print_remark
from harness.errors import BAD, GenieMissingError, WrongUseError
from harness.runtimes.base import DecodesSteps, Generates, GenerationRequest, StepWindow
from harness.runtimes.bundles.checks import find_faults
from harness.runtimes.genie.runtime import genie_bundle
from harness.runtimes.registry import open_model, runtimes
from harness.runtimes.tokenizer import ContextLimit
from harness.workloads.bench_prompt import cut_prompt
from harness.workloads.session import Session
from plugins.diagnosis.bundle import bundle_for_device
from plugins.diagnosis.graph_runtime import graph_bundle

_ANDROID = "arm64-v8a"
_GENIE = "genie"
_RUNTIMES = (_GENIE, "graph")
_ALONE = "decode alone"
"""Answers of the runtime graph without prefill."""
Answers = Sequence[Sequence[int]]
"""Tokens of each prompt."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        holds: None if it could not be looked at here.
    """

    subject: str
    holds: bool | None
    detail: str


def rehearse(
    container_dir: ContainerDir,
    prompts: Annotated[
        int, typer.Option(min=1, max=1000, help="Prompts, from one token to as long as fits.")
    ] = 20,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each answer, decoded greedily.")
    ] = 16,
    device: Annotated[
        str | None,
        typer.Option(
            help="The phone, if it is there: its bundle is checked against what it says.",
            autocompletion=complete_devices,
        ),
    ] = None,
    abi: Annotated[
        Literal["arm64-v8a", "aarch64"] | None,
        typer.Option(
            help="Without a device: the ABI that the bundle is for, Android's by default or that "
            "of Linux boards."
        ),
    ] = None,
    cache: CacheDir = None,
    json: Json = False,
) -> None:
    """Try a phone's container without the phone: its bundle, and its graphs on the emulator.

    Binaries that share weights are compiled again without, from the same DLCs and with the same
    options, since the emulator cannot run shared weights; others run byte for byte. A virtual
    device of the SoC is started for it, and stopped afterwards. Graphs that Genie does not run are
    compared with themselves: prefill with decode alone.

    Example: qnnfarm rehearse CONTAINER_DIR
    """
    if device is not None and abi is not None:
        raise WrongUseError("--device and --abi: give one of them, not both")
    phone = GenAIContainer.load(container_dir)
    with tempfile.TemporaryDirectory(prefix="qnnfarm-rehearse-") as scratch:
        print_remark("making the container for the emulator")
        twin = emulator_twin(phone, Path(scratch) / "twin", cache_root=cache)
        checks = [_compare_binaries(phone, twin), check_bundle(phone, abi or _ANDROID, device)]
        lengths = prompt_lengths(twin, prompts, max_tokens)
        tokens = _run(twin, lengths, max_tokens)
        checks += _compare(twin, lengths, tokens)
    if json:
        print_json(
            {
                "container": str(container_dir),
                "target": phone.metadata.target.name,
                "checks": [dataclasses.asdict(check) for check in checks],
                "only_a_phone": _only_a_phone(phone),
                "prompts": lengths,
                "tokens": tokens,
            }
        )
    else:
        _print(checks, phone)
    if any(check.holds is False for check in checks):
        raise typer.Exit(BAD)


def _print(checks: Sequence[Check], phone: GenAIContainer) -> None:
    console = answers()
    for title, holds in (("wrong", False), ("proven here", True), ("not tried here", None)):
        some = [check for check in checks if check.holds is holds]
        if some:
            console.print(f"{title}:", style="bold")
        for check in some:
            console.print(f"  {check.subject}: {check.detail}")
    console.print("only the phone can prove:", style="bold")
    for line in _only_a_phone(phone):
        console.print(f"  {line}")


def _only_a_phone(phone: GenAIContainer) -> tuple[str, ...]:
    shared = ", which share weights," if phone.metadata.target.weight_sharing else ""
    return (
        f"that its DSP loads the binaries{shared} and computes what the emulator does",
        "that stub, skeleton, FastRPC and the phone's system fit one another",
        "memory, speed, heat and energy",
    )


def _compare_binaries(phone: GenAIContainer, twin: GenAIContainer) -> Check:
    """Compare the descriptions of both binaries: names, tensors, encodings, effort, VTCM."""
    toolchain = OrtQnnToolchain()
    names = phone.binaries.keys()
    equal = [name for name in names if phone.metadata.files[name] == twin.metadata.files[name]]
    graphs = tensors = 0
    for name in names:
        ours, theirs = (toolchain.inspect(one.files[name]).graphs for one in (phone, twin))
        for a, b in zip(ours, theirs, strict=True):
            if without_spill(a) != without_spill(b):
                detail = f"{name}: graph {a.name} is another one when weights are not shared"
                return Check("graphs", holds=False, detail=detail)
            graphs += 1
            tensors += len((*a.inputs, *a.outputs))
    if len(equal) == len(names):
        return Check("binaries", holds=True, detail=f"{len(names)} run here byte for byte")
    return Check(
        "binaries",
        holds=True,
        detail=f"{len(names) - len(equal)} compiled from the same DLCs without shared weights: "
        f"{graphs} graphs with {tensors} inputs and outputs are equal in both",
    )


def without_spill(graph: GraphInfo) -> GraphInfo:
    """Return a graph without its spill-fill buffer, which weight sharing changes."""
    return dataclasses.replace(graph, spill_fill_bytes=0)


def _is_genies(container: GenAIContainer) -> bool:
    return container.metadata.contract == GENIE_CONTRACT


def check_bundle(phone: GenAIContainer, abi: str, device: str | None = None) -> Check:
    """Check the files that would be pushed to a phone, as far as they are on this host."""
    try:
        if device is not None:
            model = open_model(phone.path, _RUNTIMES[not _is_genies(phone)])
            bundle, faults = bundle_for_device(model, device, {})
        else:
            bundle = (genie_bundle if _is_genies(phone) else graph_bundle)(phone, abi)
            faults = find_faults(bundle, container=phone)
    except GenieMissingError as error:
        return Check("bundle", holds=None, detail=error.reason)
    detail = "; ".join(faults) or f"nothing is wrong with its {len(bundle.files)} files"
    return Check("bundle", holds=not faults, detail=detail)


def prompt_lengths(twin: GenAIContainer, number: int, most: int) -> list[int]:
    """Return as many lengths of prompts, evenly from one token to as many as fit."""
    limit = ContextLimit.of(twin)
    longest = max(1, limit.context_length - max(limit.prefill_ar, most) - 1)
    return [1 + round(step * (longest - 1) / max(1, number - 1)) for step in range(number)]


def _run(twin: GenAIContainer, lengths: Sequence[int], most: int) -> Mapping[str, Answers]:
    """Let each runtime answer prompts on a virtual device of the container's SoC.

    Of graphs that Genie does not run, the answers by decode alone come in place of Genie's.
    """
    text = cut_prompt(twin.files["tokenizer.json"], max(lengths)).token_ids
    answers_by_runtime: dict[str, Answers] = {}
    is_genies = _is_genies(twin)
    with virtual_device(twin) as device:
        for runtime in (name for name in _RUNTIMES if name in runtimes()):
            if runtime == _GENIE and not is_genies:
                continue
            replies: list[Sequence[int]] = []
            alone: list[Sequence[int]] = []
            with Session(device, open_model(twin.path, runtime)) as session:
                for number, length in enumerate(lengths, 1):
                    print_remark(f"{runtime}, prompt {number} of {len(lengths)}: {length} tokens")
                    request = GenerationRequest(most, token_ids=text[:length])
                    result = session.require(Generates).generate(request)
                    replies.append(result.token_ids or ())
                    if not is_genies:
                        first, *following = (*text[:length], *replies[-1])
                        steps = session.require(DecodesSteps).decode_steps(
                            [StepWindow((first,), tuple(following))]
                        )
                        best = steps.windows[0][length - 1 :].argmax(axis=-1)
                        alone.append([int(token) for token in best])
            if not is_genies:
                answers_by_runtime[_ALONE] = alone
            answers_by_runtime[runtime] = replies
    return answers_by_runtime


def _compare(
    twin: GenAIContainer, lengths: Sequence[int], answered: Mapping[str, Answers]
) -> Iterator[Check]:
    """Hold the tokens of all runtimes against Genie's, or those of decode alone."""
    reference, kind = next(iter(answered)), twin.genie_config.dialog.type
    some = f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens"
    yield Check(reference, holds=True, detail=f"loads it, and answers {some}")
    owner = "Genie" if reference == _GENIE else reference
    for runtime, answers_ in answered.items():
        if runtime == reference:
            continue
        differing = [
            f"after {length} tokens it says {ours}, and {owner} {theirs}"
            for length, ours, theirs in zip(lengths, answers_, answered[reference], strict=True)
            if tuple(ours) != tuple(theirs)
        ]
        if differing and kind != "basic":
            detail = f"answers {some}; a dialog of type {kind} may say something else"
            yield Check(runtime, holds=None, detail=detail)
            continue
        detail = f"{len(differing)} of {len(lengths)} answers differ: {(differing or [''])[0]}"
        if not differing:
            detail = f"gives {owner}'s tokens, {len(lengths)} of {len(lengths)} answers"
        yield Check(runtime, holds=not differing, detail=detail)
