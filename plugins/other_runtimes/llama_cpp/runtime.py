"""llama.cpp on a device: GGUF files, and its programs for speed, answers and perplexities.

Each GGUF is described by a YAML file, and each query is a process of its own.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from buildlib.gguf import GgufHeader
from harness.deploy.deployment import DeployFile
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import HostFileError, RuntimeOutputError, WrongUseError
from harness.results.records import ContainerInfo, Positions
from harness.runtimes.base import (
    Capability,
    EarlyEnd,
    Generates,
    GenerationRequest,
    GenerationResult,
    MeasuresSpeed,
    ModelRole,
    PerplexityResult,
    RuntimeOptions,
    SpeedRequest,
    Window,
)
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.deployed import DeployedRuntime, RunOutcome
from harness.runtimes.description import (
    DescribedModel,
    Description,
    describes,
    find_programs,
    find_shared_libraries,
    read_description,
)
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.tokenizer import load_tokenizer
from plugins.other_runtimes.llama_cpp.output import parse_bench, parse_chunks, parse_timings

MODEL = "model.gguf"
BENCH, COMPLETION, OLD_COMPLETION, PERPLEXITY = (
    "llama-bench", "llama-completion", "llama-cli", "llama-perplexity",
)  # fmt: skip
PROGRAMS = (BENCH, COMPLETION, OLD_COMPLETION, PERPLEXITY)
_OUTPUT = "output.txt"
_END = " [end of text]"
_TRIES = 20
"""llama.cpp 0.7.0 does not write its log out when it exits, and ends with status 0 all the same.

As plain child processes of this host with pipes or files, 48 of 400 runs of llama-completion and
104 of 400 of llama-perplexity lost their end; of llama-bench, which logs no results, 0 of 400. On a
device that is busy, 49 of 89 of llama-perplexity did.
"""


class LlamaCppRuntime(DeployedRuntime):
    """A GGUF on a device, run by llama.cpp; `Runtime`.

    Args:
        bundle: holds the model as `MODEL`.
        arguments: options that llama-bench, llama-completion and llama-perplexity share.
        environment: words before a program.
        context_length: of dialogs and of windows.
        adds_bos: whether texts begin with bos.
    """

    name: ClassVar[str] = "llama.cpp"

    def __init__(
        self,
        device: Device,
        properties: DeviceProperties,
        bundle: Bundle,
        options: RuntimeOptions,
        *,
        arguments: Sequence[str],
        environment: Sequence[str],
        context_length: int,
        adds_bos: bool,
    ) -> None:
        super().__init__(device, properties, bundle, options)
        self._adds_bos = adds_bos
        self._arguments = tuple(arguments)
        self._context_length = context_length
        self._environment = tuple(environment)

    def runner(self, capability: Capability) -> str:
        """Name the program that does this."""
        if capability is MeasuresSpeed:
            return BENCH
        return self._completion if capability is Generates else PERPLEXITY

    @property
    def _completion(self) -> str:
        """The program that answers: before llama-completion, llama-cli did so."""
        return COMPLETION if COMPLETION in self.bundle.files else OLD_COMPLETION

    def versions(self) -> Mapping[str, str]:
        """Return the hashes of llama.cpp's libraries; deploy first if needed."""
        libraries = {
            file.name: f"sha256:{file.sha256[:16]}"
            for file in self.prepare().files
            if file.name.startswith(("libllama.so", "libggml.so"))
        }
        return libraries | self.pushed()

    def measure_speed(self, request: SpeedRequest) -> Iterator[GenerationResult]:
        """Yield repetitions: the prompt of one llama-bench, and the generation after it of another.

        As with Genie, each is of processes of its own, which warm up once unless no warm-up is
        asked for. Samples of the device are those of the generation.
        """
        depth, after = request.depth_tokens, request.depth_tokens + request.prompt_tokens
        prompt = ["-p", str(request.prompt_tokens), "-n", "0", "-d", str(depth)]
        generation = ["-p", "0", "-n", str(request.new_tokens), "-d", str(after)]
        shared = ["-r", "1", "-o", "jsonl", "-m", MODEL]
        shared += ["--no-warmup"] if request.warmup == 0 else []
        for _ in range(request.repetitions):
            metrics = {
                "prompt_tokens": float(request.prompt_tokens),
                "generated_tokens": float(request.new_tokens),
            }
            lines: list[str] = []
            for arguments in (prompt, generation):
                with self.sampling():
                    outcome = self._run(BENCH, [*arguments, *shared])
                test, line = parse_bench(self.folder().read(_OUTPUT), self.device.serial)
                metrics[test.metric] = test.speeds[0]
                for key, peak in outcome.memory.items():
                    metrics[key] = max(peak, metrics.get(key, 0.0))
                lines.append(line)
            profile = f"[{', '.join(lines)}]"
            yield GenerationResult("", metrics, telemetry=self.samples, profile=profile)

    def generate(self, request: GenerationRequest) -> GenerationResult:
        """Answer a text by llama-completion, which counts bos among the prompt's tokens."""
        if request.prompt is None:
            raise WrongUseError(
                "llama.cpp's programs take a prompt in text, no tokens or embeddings"
            )
        folder = self.folder()
        folder.send({"prompt.txt": request.prompt})
        command = [
            "-m", MODEL, "-bf", "prompt.txt", "-n", str(request.max_new_tokens),
            "-c", str(self._context_length), "-no-cnv", "--no-display-prompt", "--no-escape",
            *_sampling_arguments(request.settings),
        ]  # fmt: skip
        metrics, retries = None, -1
        while metrics is None and (retries := retries + 1) < _TRIES:
            with self.sampling():
                outcome = self._run(self._completion, command)
            metrics = parse_timings(folder.read_log())
        if metrics is None:
            raise self._lost_end(self._completion)
        text = folder.read(_OUTPUT).removesuffix("\n").removesuffix("\n")
        is_whole = text.endswith(_END)
        count, most = int(metrics["generated_tokens"]), request.max_new_tokens
        cause = "an end-of-sequence token" if is_whole else None
        return GenerationResult(
            text.removesuffix(_END) if is_whole else text,
            {**metrics, **outcome.memory},
            self.samples,
            early_end=EarlyEnd(count, most, cause) if count < most else None,
            retries=retries,
        )

    def added_tokens(self, settings: DialogSettings, *, after_fill: bool = False) -> int:
        """Return the tokens before a prompt: bos, where the model has it."""
        del settings, after_fill
        return int(self._adds_bos)

    def positions(self, role: ModelRole = "target") -> Positions:
        """Name the positions that llama-perplexity scores."""
        del role
        return "second_half"

    def score(
        self,
        windows: Sequence[Window],
        role: ModelRole = "target",
        lora: Mapping[str, float] | None = None,
    ) -> PerplexityResult:
        """Score windows of one text in one process."""
        if lora:
            raise WrongUseError("the runtime llama.cpp applies no adapters of containers")
        folder = self.folder()
        folder.send({"text.txt": "".join(window.text for window in windows)})
        command = ["-m", MODEL, "-f", "text.txt", "-c", str(self._context_length)]
        command += ["--chunks", str(len(windows))]
        scored = [len(window.scored) for window in windows]
        output, retries, last = "", -1, f"[{len(windows)}]"
        while last not in output and (retries := retries + 1) < _TRIES:
            self._run(PERPLEXITY, command, times=len(windows))
            output = folder.read(_OUTPUT)
        if last not in output:
            raise self._lost_end(PERPLEXITY)
        perplexities = parse_chunks(output, scored, self.device.serial)
        return PerplexityResult.of(perplexities, windows, self.positions(role), retries=retries)

    def _lost_end(self, program: str) -> RuntimeOutputError:
        reason = f"{program} lost the end of its output {_TRIES} times"
        return RuntimeOutputError(self.device.serial, reason)

    def _run(self, program: str, arguments: Sequence[str], times: int = 1) -> RunOutcome:
        if program not in self.bundle.files:
            raise WrongUseError(f"the build of llama.cpp has no {program}, which this needs")
        command = [*self._environment, f"./{program}"]
        timeout_s = self.limit_s(times)
        return self.folder().run(
            [*command, *arguments, *self._arguments],
            name=program, timeout_s=timeout_s, stdout=_OUTPUT,
        )  # fmt: skip


def _sampling_arguments(settings: DialogSettings) -> list[str]:
    if settings.is_greedy:
        return ["--temp", "0"]
    flags = {"seed": "--seed", "temp": "--temp", "top-k": "--top-k", "top-p": "--top-p"}
    return [word for key, value in settings.sampling.items() for word in (flags[key], str(value))]


RUNTIME = LlamaCppRuntime
_FOLDERS = (".", "bin", "lib", "lib64")
_SLACK = 8
"""Tokens after the last window: what is cut off may change the tokens before it."""


def _flag(value: object) -> object:
    """Undo that YAML takes `on` and `off` for truth values."""
    return ("on" if value else "off") if isinstance(value, bool) else value


class LlamaCppDescription(Description):
    """Options of llama.cpp's programs, by the names that these have.

    Attributes:
        device: `--device`: `HTP0`, `GPUOpenCL`, or `none` for the CPU; by default its own choice.
        n_gpu_layers: `-ngl`: layers to put there.
        threads: `-t`.
        flash_attn: `-fa`.
        cache_type: `-ctk` and `-ctv`: type of the KV cache.
    """

    runtime: Literal["llama.cpp"]
    device: Annotated[str, Field(pattern=r"\A[\w,/.:-]+\Z")] | None = None
    n_gpu_layers: Annotated[int, Field(ge=-1, le=10_000)] | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    flash_attn: Annotated[Literal["on", "off", "auto"], BeforeValidator(_flag)] | None = None
    cache_type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] | None = None


def runs(path: Path) -> bool:
    """Return whether it is a description for llama.cpp."""
    return describes(path, RUNTIME.name)


def open_model(path: Path) -> "LlamaCppModel":
    """Open a description and the GGUF that it names."""
    model = LlamaCppModel(path, read_description(path, LlamaCppDescription, RUNTIME.name))
    _ = model.header
    return model


@dataclass(frozen=True)
class LlamaCppModel(DescribedModel[LlamaCppDescription]):
    """A GGUF that llama.cpp runs; `Model`."""

    runtime: ClassVar[type[LlamaCppRuntime]] = LlamaCppRuntime
    takes_depth: ClassVar[bool] = True

    @cached_property
    def header(self) -> GgufHeader:
        """Header of the GGUF."""
        return GgufHeader.read(self.model_path)

    @property
    def context_length(self) -> int:
        """Tokens of a context: as described, or as the GGUF says."""
        length = self.description.context_length or self.header.context_length
        if length is None:
            raise WrongUseError(f"{self.path} names no context_length, and its GGUF has none")
        return length

    @property
    def info(self) -> ContainerInfo:
        """The GGUF in the results store."""
        header = self.header
        return self.container_info(
            name=header.name,
            precision=header.precision or None,
            parameters=header.parameters or None,
        )

    @property
    def toolchain(self) -> Mapping[str, str]:
        """The format: a GGUF does not tell the version of its converter."""
        return {"toolchain": "gguf"}

    def check_settings(self, settings: DialogSettings) -> None:
        """Refuse settings that llama.cpp does not have."""
        for name in ("stop", "lora", "genie_config"):
            if getattr(settings, name) is not None:
                raise WrongUseError(f"{name}: the runtime {self.runtime.name} has no such setting")

    def windows(
        self, text: str, most: int | None = None, role: ModelRole = "target"
    ) -> Sequence[Window]:
        """Cut a text as llama-perplexity does: whole contexts.

        The first token of each becomes bos, unless the model begins texts with none. The second
        half is scored: tokens CL/2 + 1 to CL - 1, counted from 0.
        """
        if role != "target":
            raise WrongUseError("a GGUF has no draft model")
        size = self.context_length
        text = text.replace("\0", " ")
        encoding = load_tokenizer(self.tokenizer).encode(text, add_special_tokens=False)
        bos = int(self.header.adds_bos)  # which llama.cpp puts in front
        ids = [*[-1] * bos, *encoding.ids]
        starts = [*[0] * bos, *(start for start, _ in encoding.offsets)]
        if len(ids) < 2 * size:
            raise WrongUseError(
                f"the text has {len(ids)} tokens, and llama-perplexity wants two contexts of {size}"
            )
        count = min(most or len(ids), len(ids) // size)
        ends = [starts[number * size] for number in range(1, count)]
        rest = max(count, 2) * size + _SLACK
        ends.append(starts[rest] if rest < len(starts) else len(text))
        half = size // 2 + 1
        return [
            Window(
                text[begin:end],
                scored=tuple(ids[number * size + half : (number + 1) * size]),
                context=tuple(ids[number * size + bos : number * size + half]),
            )
            for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]

    def device_bundle(self, device: DeviceProperties) -> Bundle:
        """Return the programs and libraries of llama.cpp, and the GGUF."""
        build = self.build_for(device)
        folders = [build / name for name in _FOLDERS]
        programs = find_programs(PROGRAMS, folders, "llama.cpp")
        if not programs:
            names = ", ".join(PROGRAMS)
            raise HostFileError(str(build), f"neither it nor its bin has one of {names}")
        libraries = find_shared_libraries(folders, "llama.cpp")
        model = DeployFile(self.model_path, origin="model")
        return self.bundle(device, {**libraries, **programs, MODEL: model})

    def start(
        self, device: Device, properties: DeviceProperties, options: RuntimeOptions
    ) -> LlamaCppRuntime:
        """See `Model.start`."""
        description = self.description
        values = {
            "--device": description.device,
            "-ngl": description.n_gpu_layers,
            "-t": description.threads,
            "-fa": description.flash_attn,
            "-ctk": description.cache_type,
            "-ctv": description.cache_type,
        }
        flags = [(flag, str(value)) for flag, value in values.items() if value is not None]
        return LlamaCppRuntime(
            device,
            properties,
            self.device_bundle(properties),
            options,
            arguments=(*itertools.chain(*flags), *description.arguments),
            environment=self.environment,
            context_length=self.context_length,
            adds_bos=self.header.adds_bos,
        )
