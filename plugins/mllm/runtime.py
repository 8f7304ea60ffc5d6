"""mllm's runners of contexts that were compiled ahead of time.

Source: https://github.com/UbiquitousLearning/mllm (MIT), `examples/*_qnn_aot/aot_run.cpp` and
`mllm/backends/qnn/aot_rt` at b9c3070. The runner of Qwen 3 reads one line from its standard input,
puts its chat template around it, and streams a greedy answer up to an end-of-sequence token or the
end of the context. Those of Qwen 2 and Llama take numbers of tokens, and measure themselves.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from buildlib.targets import find_soc
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from harness.deploy.deployment import DeployFile
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import HostFileError, RuntimeOutputError, WrongUseError
from harness.results.derived import measure_energy
from harness.runtimes.base import (
    EarlyEnd,
    GenerationRequest,
    GenerationResult,
    RuntimeOptions,
    SpeedRequest,
)
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.description import (
    DescribedModel,
    Description,
    ProgramRuntime,
    Word,
    describes,
    find_programs,
    find_shared_libraries,
    read_description,
)
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.tokenizer import encode, load_tokenizer
from plugins.mllm.config import RUNNER_CL, ModelConfig, read_model_config
from plugins.mllm.graph_contract import find_fault

_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Chat template of the runner of Qwen 3."""
_LARGEST_ANSWER = 16 << 20
_ENDS = ("<|im_end|>", "<|endoftext|>")
_ASKS = b"Prompt text (or 'exit/quit'): "
_COLORS = rb"(?:\x1b\[[0-9;]*m)*"
_LOG_LINE = re.compile(_COLORS + rb"\[(?:INFO|WARN|ERROR)\]" + _COLORS + rb" \S+:\d+ [^\n]*\n")
_PROMPT_TOKENS = re.compile(rb"num_tokens: (\d{1,7})\n")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_SUMMARY = re.compile(
    r"Prefill time +: +(?P<prefill>[\d.]+) .s.*?Decode time +: +(?P<decode>[\d.]+) .s.*?"
    r"Prefill tokens +: +(?P<prompt>\d+)\s.*?Decode tokens +: +(?P<generated>\d+)\s",
    re.DOTALL,
)


@dataclass(frozen=True)
class StreamedAnswer:
    """Answer of the runner of Qwen 3, by the clock of its output.

    Attributes:
        prompt_tokens: with those of the chat template.
        init_s: until it asked for the prompt.
        ttft_s: from there to the first token.
        decode_s: from the first token to the last.
    """

    text: str
    prompt_tokens: int
    init_s: float
    ttft_s: float
    decode_s: float


def parse_answer(printed: bytes, clock: str) -> StreamedAnswer:
    """Read an answer, and when it came.

    Args:
        printed: by the runner, with its log.
        clock: as `output_clock.sh` writes it.

    Raises:
        ValueError: something of it is missing.
    """
    start = printed.find(_ASKS) + len(_ASKS)
    begin = start
    while line := _LOG_LINE.match(printed, begin):
        begin = line.end()
    log = _PROMPT_TOKENS.search(printed, start, begin)
    if log is None:
        raise ValueError("it did not tell the number of tokens of the prompt")
    after = _LOG_LINE.search(printed, begin)
    answer = printed[begin : after.start() if after else len(printed)].removesuffix(b"\n")
    moments = [(float(time), int(size)) for time, size in map(str.split, clock.splitlines())]

    def reached(size: int) -> float:
        return next(time for time, total in moments if total >= size)

    try:
        request_s, first, last = reached(start), reached(begin + 1), reached(begin + len(answer))
    except StopIteration:
        raise ValueError("its answer is empty, or its clock ends early") from None
    text = answer.decode(errors="replace")
    return StreamedAnswer(
        text, int(log[1]), request_s - moments[0][0], first - request_s, last - first
    )


def parse_summary(printed: str) -> dict[str, float]:
    """Read the figures of a "Performance Summary".

    Raises:
        ValueError: there is none.
    """
    match = _SUMMARY.search(_ANSI.sub("", printed))
    if match is None:
        raise ValueError("it printed no Performance Summary")
    prefill_s, decode_s = float(match["prefill"]) / 1e6, float(match["decode"]) / 1e6
    metrics = {
        "prompt_tokens": float(match["prompt"]),
        "generated_tokens": float(match["generated"]),
        "ttft_s": prefill_s,
    }
    spans = {
        "prefill_tokens_per_s": (metrics["prompt_tokens"], prefill_s),
        "decode_tokens_per_s": (metrics["generated_tokens"], decode_s),
    }
    return metrics | {key: count / span for key, (count, span) in spans.items() if span > 0}


_MODEL, _TOKENIZER, _CONFIG = "model.bin", "tokenizer.json", "config.json"
_PROMPT, _OUTPUT, _CLOCK = "prompt.txt", "output.txt", "output.clock"


class MllmRuntime(ProgramRuntime):
    """A context on a device, run by mllm's runner; `Runtime`.

    The command has `-m`, `-t`, `-c` and `--ar_len`.
    """

    name: ClassVar[str] = "mllm"
    libraries: ClassVar[tuple[str, ...]] = ("libMllmRT.so", "libMllmQNNBackend.so", "libQnnHtp.so")


class MllmDialog(MllmRuntime):
    """The runner of Qwen 3, which answers; `Generates`."""

    def generate(self, request: GenerationRequest) -> GenerationResult:
        """Answer a prompt of one line, until the answer or the context ends."""
        tokenizer = load_tokenizer(self._model.tokenizer)
        prompt = request.prompt
        if request.token_ids is not None:
            prompt = str(tokenizer.decode(list(request.token_ids))).replace("\n", " ")
        if prompt is None or "\n" in prompt.rstrip("\n"):
            raise WrongUseError("mllm's runner takes a prompt of one line of text")
        folder = self.folder()
        folder.send({_PROMPT: prompt.rstrip("\n") + "\n"})
        script = f"{self.prepare().scripts_dir}/output_clock.sh"
        command = ["sh", script, _CLOCK, _PROMPT, _OUTPUT, *self._command]
        timeout_s = self.limit_s()
        with self.sampling():
            outcome = folder.run(command, name=self.runner(type(self)), timeout_s=timeout_s)
        output = folder.pull(_OUTPUT, _LARGEST_ANSWER)
        try:
            answer = parse_answer(output, folder.read(_CLOCK))
        except ValueError as error:
            raise RuntimeOutputError(self.device.serial, f"of the runner: {error}") from error
        count, most = len(encode(tokenizer, answer.text)), request.max_new_tokens
        text, end = answer.text, next((e for e in _ENDS if answer.text.endswith(e)), None)
        metrics = {
            "init_s": answer.init_s,
            "prompt_tokens": float(answer.prompt_tokens),
            "generated_tokens": float(count),
        }
        if answer.ttft_s > 0:
            metrics["ttft_s"] = answer.ttft_s
            metrics["prefill_tokens_per_s"] = answer.prompt_tokens / answer.ttft_s
        if answer.decode_s > 0:
            metrics["decode_tokens_per_s"] = (count - 1) / answer.decode_s
        reason = "an end-of-sequence token" if end else "the context ended"
        return GenerationResult(
            text.removesuffix(end) if end else text,
            metrics | measure_energy(metrics, self.samples) | outcome.memory,
            self.samples,
            clocked=frozenset(metrics) - {"prompt_tokens", "generated_tokens"},
            early_end=EarlyEnd(count, most, reason) if count < most else None,
        )

    def added_tokens(self, settings: DialogSettings, *, after_fill: bool = False) -> int:
        """Return the tokens of the chat template."""
        del settings, after_fill
        return len(encode(load_tokenizer(self._model.tokenizer), _TEMPLATE.format("")))


class MllmSpeed(MllmRuntime):
    """The runners of Qwen 2 and Llama, which take tokens 0, 1, 2, ...; `MeasuresSpeed`."""

    def measure_speed(self, request: SpeedRequest) -> Iterator[GenerationResult]:
        """Yield repetitions, each of a process of its own."""
        lengths = ["--seq_len", str(request.prompt_tokens), "--gen_len", str(request.new_tokens)]
        folder, name = self.folder(), self.runner(type(self))
        for number in range((request.warmup or 0) + request.repetitions):
            with self.sampling():
                outcome = folder.run(
                    [*self._command, *lengths],
                    name=name,
                    timeout_s=self.limit_s(),
                    stdout=_OUTPUT,
                )
            output = folder.read(_OUTPUT)
            try:
                metrics = parse_summary(output)
            except ValueError as error:
                raise RuntimeOutputError(self.device.serial, str(error)) from error
            if number >= (request.warmup or 0):
                yield GenerationResult("", metrics | outcome.memory, self.samples)


RUNTIME = MllmDialog
_OP_PACKAGES: Final = {
    "libQnnLLaMAPackage_CPU.so": "aarch64-android/libQnnLLaMAPackage.so",
    "libQnnLLaMAPackage_HTP.so": "hexagon-{}/libQnnLLaMAPackage.so",
}
"""Files of `custom-op-package/LLaMAPackage/build`, by their names on a device."""


class MllmDescription(Description):
    """A context, and the options of mllm's runners.

    Attributes:
        build: folder of the runners and their libraries, `build-android-arm64-v8a-qnn/bin`.
        tokenizer: `-t`, a `tokenizer.json`.
        config: `-c`, a `config_X.json`.
        ar_len: `--ar_len`, of a prefill graph that the context has.
        op_packages: folder `custom-op-package/LLaMAPackage/build`.
    """

    runtime: Literal["mllm"]
    tokenizer: Word
    config: Word
    ar_len: Annotated[int, Field(ge=1, le=RUNNER_CL)] = 32
    op_packages: Word | None = None


def runs(path: Path) -> bool:
    """Return whether it is a description for mllm's runners."""
    return describes(path, RUNTIME.name)


def open_model(path: Path) -> "MllmModel":
    """Open a description."""
    return described_model(path, read_description(path, MllmDescription, RUNTIME.name))


def described_model(path: Path, description: MllmDescription) -> "MllmModel":
    """Open the model of a description; see `open_model`."""
    model = MllmModel(path, description)
    for file in (model.model_path, model.tokenizer, model.resolve(description.config)):
        if not file.is_file():
            raise HostFileError(str(file), "it is no file")
    check_binary(model.model_path, description.ar_len)
    if model.config.family is None:
        raise HostFileError(description.config, "model_type is missing: it chooses the runner")
    return model


def check_binary(path: Path, ar_len: int) -> None:
    """Refuse a context that mllm's runners would read past, or not find their graphs in."""
    graphs = OrtQnnToolchain().inspect(path).graphs
    fault = find_fault(graphs, ar_len)
    if fault is not None:
        raise WrongUseError(f"{path}: {fault}")
    lengths = {graph.tensor("attention_mask").shape[-1] for graph in graphs}
    if lengths != {RUNNER_CL}:
        cl = ", ".join(map(str, sorted(lengths)))
        raise WrongUseError(
            f"{path}: its CL is {cl}, and mllm's runners have {RUNNER_CL} compiled in: compile "
            f"with max_cache_length {RUNNER_CL}"
        )


@dataclass(frozen=True)
class MllmModel(DescribedModel[MllmDescription]):
    """A context that mllm's runners run; `Model`."""

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return read_model_config(self.resolve(self.description.config))

    @property
    def runtime(self) -> type[MllmRuntime]:
        """Runtime of the family's runner."""
        return MllmDialog if self.config.family == "qwen3" else MllmSpeed

    @property
    def context_length(self) -> int:
        """The context that its runners have compiled in."""
        return RUNNER_CL

    def check_settings(self, settings: DialogSettings) -> None:
        """Refuse all settings."""
        if settings != DialogSettings():
            raise WrongUseError("mllm's runners answer greedily, without settings")

    @property
    def program(self) -> str:
        """The runner of the family."""
        return f"mllm-{self.config.family}-aot-runner"

    def device_bundle(self, device: DeviceProperties) -> Bundle:
        """Return the files of the document's list that a device needs."""
        description, build = self.description, self.build_for(device)
        programs = find_programs((self.program,), [build], "mllm")
        if not programs:
            raise HostFileError(str(build), f"it has no {self.program}: name mllm's build")
        own = {
            **find_shared_libraries([build], "mllm"),
            **programs,
            _MODEL: DeployFile(self.model_path, origin="context"),
            _TOKENIZER: DeployFile(self.tokenizer, origin="model"),
            _CONFIG: DeployFile(self.resolve(description.config), origin="model"),
        }
        if description.op_packages is not None:
            arch = find_soc(device.soc).dsp_arch
            for name, place in _OP_PACKAGES.items():
                path = self.resolve(description.op_packages) / place.format(arch)
                if not path.is_file():
                    raise HostFileError(str(path), "there is no such op package")
                own[name] = DeployFile(path, origin="mllm's op package")
        return self.bundle_with_qnn(device, own)

    def start(
        self, device: Device, properties: DeviceProperties, options: RuntimeOptions
    ) -> MllmRuntime:
        """See `Model.start`."""
        description = self.description
        command = [*self.environment, f"./{self.program}", "-m", _MODEL, "-t", _TOKENIZER]
        command += ["-c", _CONFIG, "--ar_len", str(description.ar_len), *description.arguments]
        bundle = self.device_bundle(properties)
        return self.runtime(device, properties, bundle, options, command, self)
