"""Containers by their graphs on a device, each query a process of its own."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, TypeAdapter, ValidationError

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.op_packages import registrations
from buildlib.toolchains.base import NodeCycles
from harness.deploy.deployment import DeployFile
from harness.devices.base import DeviceProperties
from harness.errors import RuntimeChoiceError, RuntimeOutputError, WrongUseError
from harness.results.derived import measure_energy
from harness.results.records import Positions
from harness.runtimes.base import (
    Capability,
    Framing,
    GenerationRequest,
    GenerationResult,
    ModelRole,
    PerplexityResult,
    StepLogits,
    StepWindow,
    Window,
)
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.bundles.sources import ANDROID, NAMED, find_python, find_qnn
from harness.runtimes.container_model import (
    ContainerModel,
    ContainerRuntime,
    has_bos,
    open_container,
    qnn_api_files,
    target_of,
)
from harness.runtimes.deployed import RunFolder, RunOutcome, runner_command
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.genie.output import (
    StepRun,
    complete_figures,
    find_early_end,
    generated_text,
    parse_clock,
    parse_figures,
    parse_ids,
    parse_perplexity,
    parse_trace,
)
from harness.runtimes.genie.runtime import (
    added_tokens,
    config_of,
    eos_tokens,
    framed,
)
from harness.runtimes.tokenizer import encode
from plugins.diagnosis.graph_tensors import StepTensors, parse_dump

RUNNER = "graph_run.py"
_SCRIPTS = {
    "device_scripts": (
        "genie_api.py", "genie_embeddings.py", "genie_logits.py", "genie_nodes.py",
        "genie_t2t_run.py", "genie_trace.py",
    ),
    "plugins.diagnosis.on_device": ("graph_model.py", RUNNER),
}  # fmt: skip
_CONFIG, _OUTPUT, _TRACE = "query_config.json", "output.txt", "trace.json"
_DUMP = "tensors.bin"
_LARGEST_DUMP = 2 << 30


def plain_config(settings: DialogSettings, container: GenAIContainer) -> GenieConfig:
    """Give the configuration of a dialog that decodes greedily, one token a call.

    A dialog that speculates is decoded by its target alone, which says the same.
    """
    features = {
        "a sampler": not settings.is_greedy,
        "stop sequences": bool(settings.stop),
        "LoRA adapters": bool(settings.lora),
    }
    for name, is_asked in features.items():
        if is_asked:
            raise WrongUseError(
                f"the runtime graph decodes greedily, without {name}: use the runtime genie"
            )
    return config_of(settings, container).as_basic()


def graph_bundle(container: GenAIContainer, abi: str) -> Bundle:
    """Collect all that the graphs of a container need on devices of an ABI."""
    scripts = {
        name: Path(str(resources.files(package) / name))
        for package, names in _SCRIPTS.items()
        for name in names
    }
    paths = {**scripts, **qnn_api_files()}
    files = {name: DeployFile(path, origin="container") for name, path in container.files.items()}
    files |= {name: DeployFile(path, origin="qnnfarm") for name, path in paths.items()}
    return find_qnn(abi, target_of(container).soc).add({**files, **find_python(abi)})


_NODE_CYCLES = TypeAdapter(dict[str, tuple[tuple[str, Annotated[int, Field(ge=0)]], ...]])


class GraphRuntime(ContainerRuntime):
    """A container on a device, run by its graphs; `Generates`, `Scores` and `DecodesSteps`."""

    name: ClassVar[str] = "graph"
    bundle_of = staticmethod(graph_bundle)

    @property
    def _arguments(self) -> tuple[str, ...]:
        packages = registrations(self._container.metadata.op_packages)
        words = [word for package in packages for word in ("--op-package", str(package))]
        return ("--log", self.options.log_level or "error", *words)

    def runner(self, capability: Capability) -> str:  # noqa: ARG002
        """See `Runtime.runner`."""
        return RUNNER

    def versions(self) -> Mapping[str, str]:
        """Return the hashes of the library on the device; deploy first if needed."""
        return {
            "QNN from": self.bundle.files["libQnnHtp.so"].origin,
            "libQnnHtp.so": f"sha256:{(self.sha256_of('libQnnHtp.so') or '')[:16]}",
            **self.pushed(),
        }

    def generate(self, request: GenerationRequest) -> GenerationResult:
        """Answer a prompt greedily."""
        return self._answer(request, ())

    def dump(
        self,
        request: GenerationRequest,
        step: int,
        names: Sequence[str] = (),
        *,
        cache_root: Path | None = None,
    ) -> tuple[GenerationResult, StepTensors]:
        """Answer a prompt, and return tensors of the call that gives a token of the answer.

        Inner tensors of graphs are had by compiling the graphs again with more outputs, and running
        them beside those of the container.

        Args:
            request: without tokens that fill the context.
            step: the token's number, from 0.
            names: see `expose_tensors`; inputs and outputs of graphs are there anyway.
            cache_root: of the build that made the container.
        """
        from plugins.diagnosis.inner_tensors import expose_tensors

        result, tensors = self._dump(request, step)
        inner = [name for name in names if name not in tensors.values]
        if not inner:
            return result, tensors
        with tempfile.TemporaryDirectory(prefix="qnnfarm-dump-") as scratch:
            folder = Path(scratch) / "container"
            container = expose_tensors(self._container, inner, folder, cache_root=cache_root)
            runtime = GraphRuntime(self.device, self._properties, container, self.options)
            try:
                return result, runtime._dump(request, step)[1].beside(tensors)
            finally:
                runtime.clean()

    def node_cycles(self, repetitions: int) -> NodeCycles:
        """Run each graph some times on zeros, and return the least cycles of its compiled nodes.

        They are those of the device: of its DSP, or of the emulator on the host.
        """
        config = plain_config(DialogSettings(), self._container)
        folder = self.folder()
        self._run(folder, config, ["--node-cycles", str(repetitions)], {}, times=repetitions)
        text = folder.read(_OUTPUT)
        try:
            return _NODE_CYCLES.validate_json(text)
        except ValidationError as error:
            reason = "unreadable cycles of nodes"
            raise RuntimeOutputError(self.device.serial, reason) from error

    def _dump(self, request: GenerationRequest, step: int) -> tuple[GenerationResult, StepTensors]:
        result = self._answer(request, ["--dump", _DUMP, "--step", str(step)])
        prompt = request.token_ids or encode(self._tokenizer, request.prompt or "")
        config = framed(plain_config(request.settings, self._container), request.framing)
        bos = config.dialog.context.bos_token
        tokens = [*([bos] if bos >= 0 else []), *prompt, *(result.token_ids or ())]
        return result, parse_dump(
            self.folder().pull(_DUMP, _LARGEST_DUMP), tokens, self.device.serial
        )

    def _answer(self, request: GenerationRequest, options: Sequence[str]) -> GenerationResult:
        if request.embeddings is not None:
            raise WrongUseError("the runtime graph takes text or token ids, no embeddings")
        config = framed(plain_config(request.settings, self._container), request.framing)
        most = request.max_new_tokens
        prompt = request.token_ids or encode(self._tokenizer, request.prompt or "")
        prompt_tokens = added_tokens(config) + len(request.fill_token_ids) + len(prompt)
        self._limit.for_dialog(config).check(prompt_tokens, most)
        config = config.with_dialog(max_num_tokens=most)
        inputs = {"tokens.txt": _words(prompt)}
        command = ["-tok", "tokens.txt", "--profile", "profile.json", "--clock", "clock.json"]
        command += options
        if request.fill_token_ids:
            inputs["fill.txt"] = _words(request.fill_token_ids)
            command += ["--fill_file", "fill.txt"]
        folder = self.folder()
        with self.sampling():
            outcome = self._run(folder, config, command, inputs, new_tokens=most)
        serial = self.device.serial
        ids = parse_ids(generated_text(folder.read(_OUTPUT), serial), config, serial)
        profiled = folder.read("profile.json")
        metrics = complete_figures(parse_figures(profiled, serial), {}, serial)
        clock = parse_clock(folder.read("clock.json"), serial)
        energy = measure_energy(metrics, self.samples, clock.began_s)
        return GenerationResult(
            self._decode(prompt, ids),
            metrics | clock.tails | energy | outcome.memory,
            self.samples,
            profiled,
            self._read_trace(folder),
            token_ids=ids,
            early_end=find_early_end(metrics["generated_tokens"], most, clock),
        )

    def added_tokens(self, settings: DialogSettings, *, after_fill: bool = False) -> int:
        """See `Generates.added_tokens`."""
        return 0 if after_fill else added_tokens(plain_config(settings, self._container))

    def end_token(self, settings: DialogSettings, framing: Framing) -> int:
        """See `TakesChats.end_token`."""
        return eos_tokens(framed(plain_config(settings, self._container), framing))[0]

    def positions(self, role: ModelRole = "target") -> Positions:
        """Name the positions that are scored: the same as Genie's."""
        self._require_target(role)
        return "first_cl_minus_ar" if has_bos(self._container) else "no_bos_first_cl_minus_ar"

    def score(
        self,
        windows: Sequence[Window],
        role: ModelRole = "target",
        lora: Mapping[str, float] | None = None,
    ) -> PerplexityResult:
        """Score windows by prefill, one after another in one process."""
        self._require_target(role)
        config = plain_config(DialogSettings(lora=lora or None), self._container)
        inputs = {"texts.json": json.dumps([window.tokens for window in windows])}
        command = ["--score", "texts.json", "--summary", "scores.json"]
        folder = self.folder()
        self._run(folder, config, command, inputs, times=len(windows))
        result = parse_perplexity(
            folder.read("scores.json"), windows, self.device.serial, self.positions()
        )
        trace = self._read_trace(folder)
        return replace(result, traces=(trace,) if trace else ())

    def decode_steps(self, windows: Sequence[StepWindow]) -> StepLogits:
        """Decode texts step by step; each step goes on with the token of the text."""
        framing = None if windows[0].bos else Framing()
        config = framed(plain_config(DialogSettings(), self._container), framing)
        for window in windows:
            self._limit.check(added_tokens(config) + len(window.prompt), len(window.following))
        run = StepRun(
            self.device,
            self.folder(),
            self.limit_s(new_tokens=max(len(window.following) for window in windows)),
            self._arguments,
            trace=self.options.trace,
            command=runner_command(RUNNER),
        )
        return run.decode(windows, config)

    def _run(
        self,
        folder: RunFolder,
        config: GenieConfig,
        command: Sequence[str],
        inputs: Mapping[str, str],
        *,
        times: int = 1,
        new_tokens: int = 0,
    ) -> RunOutcome:
        folder.send({_CONFIG: config.to_json(), **inputs})
        whole = [*runner_command(RUNNER), "-c", _CONFIG, *command, *self._arguments]
        whole += ["--trace", _TRACE] if self.options.trace else []
        timeout_s = self.limit_s(times, new_tokens)
        return folder.run(whole, name=RUNNER, timeout_s=timeout_s, stdout=_OUTPUT)

    def _read_trace(self, folder: RunFolder) -> str:
        if not self.options.trace:
            return ""
        return parse_trace(folder.read(_TRACE), self.device.serial)

    def _require_target(self, role: ModelRole) -> None:
        if role != "target":
            raise WrongUseError("the runtime graph runs no draft models: use the runtime genie")

    def _decode(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of an answer, with the space that only stands after a prompt."""
        before = str(self._tokenizer.decode(list(prompt)))
        whole = str(self._tokenizer.decode([*prompt, *ids]))
        if whole.startswith(before):
            return whole[len(before) :]
        return str(self._tokenizer.decode(list(ids)))  # the answer ends a character of the prompt


def _words(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


RUNTIME = GraphRuntime


def runs(path: Path) -> bool:
    """Return whether it is a folder, as containers are, or nothing yet."""
    return not path.is_file()


def open_model(path: Path) -> "GraphModel":
    """Open a container; see `open_container`."""
    container = open_container(path)
    if container.genie_config.dialog.target_engine.longcontext is not None:
        raise WrongUseError(
            f"{container.path} has a long context, which slides as Genie moves its cache: use the "
            "runtime genie"
        )
    return GraphModel(container)


@dataclass(frozen=True)
class GraphModel(ContainerModel):
    """A container that the graph runtime runs; `Model`."""

    runtime: ClassVar[type[GraphRuntime]] = GraphRuntime

    def dialog_config(self, settings: DialogSettings, depth_tokens: int) -> GenieConfig:
        """Return the configuration of a dialog, which may begin at any depth."""
        del depth_tokens
        return plain_config(settings, self.container)

    def check_fit(self, device: DeviceProperties) -> None:
        """See `Model.check_fit`."""
        if device.abi == ANDROID and not find_python(ANDROID):
            reason = f"{RUNNER} needs Python, which Android has not: {NAMED}"
            raise RuntimeChoiceError(device.serial, reason)
        super().check_fit(device)
