"""ExecuTorch's `qnn_llama_runner`.

Source: https://github.com/pytorch/executorch (BSD-3-Clause),
`examples/qualcomm/oss_scripts/llama/qnn_llama_runner.cpp` and its README; what it reports is
`extension/llm/runner/stats.h` (`print_report`).
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from harness.deploy.deployment import DeployFile
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import HostFileError, RuntimeOutputError, WrongUseError
from harness.runtimes.base import (
    GenerationRequest,
    GenerationResult,
    RuntimeOptions,
)
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.description import (
    DescribedModel,
    Description,
    ProgramRuntime,
    describes,
    find_programs,
    find_shared_libraries,
    read_description,
)
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.tokenizer import load_tokenizer

OBSERVER = "PyTorchObserver "
"""Mark before the report of a query in the log."""


def parse_report(report: str) -> tuple[dict[str, float], float]:
    """Compute the metrics of a report as ExecuTorch's `print_report` does.

    What took no millisecond, or is 0 as nothing measured it, is left out. The second value is when
    its process began to load the model, or else the query began, in seconds by its clock.

    Raises:
        ValueError: the report lacks a figure, or cannot be read.
    """
    try:
        entry = json.loads(report)
        second = float(entry["SCALING_FACTOR_UNITS_PER_SECOND"])
        begin, end = entry["inference_start_ms"], entry["inference_end_ms"]
        prefilled = entry["prompt_eval_end_ms"]
        metrics = {
            "prompt_tokens": float(entry["prompt_tokens"]),
            "generated_tokens": float(entry["generated_tokens"]),
            "init_s": (entry["model_load_end_ms"] - entry["model_load_start_ms"]) / second,
            "ttft_s": (entry["first_token_ms"] - begin) / second,
            "elapsed_s": (end - begin) / second,
        }
        start_s = float(entry["model_load_start_ms"] or begin) / second
        spans = {
            "prefill_tokens_per_s": ("prompt_tokens", (prefilled - begin) / second),
            "decode_tokens_per_s": ("generated_tokens", (end - prefilled) / second),
        }
    except KeyError as error:
        raise ValueError(f"the report lacks {error}") from error
    except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"the report cannot be read: {error}") from error
    rates = {key: metrics[count] / span for key, (count, span) in spans.items() if span > 0}
    return {key: value for key, value in {**metrics, **rates}.items() if value}, start_s


PROGRAM = "qnn_llama_runner"
_FOLDERS = (
    ".", "bin", "lib", "examples/qualcomm/oss_scripts/llama", "backends/qualcomm",
)  # fmt: skip
"""Where CMake leaves the runner and the backend in its build folder."""
_MODEL, _TOKENIZER, _TOKENS = "model.pte", "tokenizer.json", "tokens.raw"
_ANSWER, _SPEED, _OUTPUT = "outputs.txt", "inference_speed.txt", "stdout.txt"


class ExecuTorchRuntime(ProgramRuntime):
    """A `.pte` on a device, run by `qnn_llama_runner`; `Runtime`.

    It is asked in tokens (`--tokenized_prompt`), so that it puts neither a chat template nor bos
    around a prompt, and `--seq_len`, which counts prompt and answer, is what was asked for.
    """

    name: ClassVar[str] = "executorch"
    libraries: ClassVar[tuple[str, ...]] = ("libqnn_executorch_backend.so", "libQnnHtp.so")

    def generate(self, request: GenerationRequest) -> GenerationResult:
        """Answer a prompt."""
        if request.prompt is not None:
            tokenizer = load_tokenizer(self._model.tokenizer)
            tokens = tuple(tokenizer.encode(request.prompt).ids)
        elif request.token_ids is not None:
            tokens = request.token_ids
        else:
            raise WrongUseError("qnn_llama_runner takes a prompt in text or tokens")
        folder = self.folder()
        folder.send({_TOKENS: struct.pack(f"<{len(tokens)}Q", *tokens)})
        command = [*self._command, "--model_path", _MODEL, "--tokenizer_path", _TOKENIZER]
        command += ["--tokenized_prompt", _TOKENS]
        command += ["--seq_len", str(len(tokens) + request.max_new_tokens)]
        command += ["--temperature", str(request.settings.sampling.get("temp", 0))]
        command += ["--output_path", _ANSWER, "--performance_output_path", _SPEED]
        timeout_s = self.limit_s()
        with self.sampling():
            outcome = folder.run(command, name=PROGRAM, timeout_s=timeout_s, stdout=_OUTPUT)
        log = folder.read(_OUTPUT) + folder.read_log()
        reports = [line.partition(OBSERVER)[2] for line in log.splitlines() if OBSERVER in line]
        if len(reports) != 1:
            reason = f"{PROGRAM} reported {len(reports)} queries"
            raise RuntimeOutputError(self.device.serial, reason)
        try:
            metrics, _ = parse_report(reports[0])
        except ValueError as error:
            raise RuntimeOutputError(self.device.serial, str(error)) from error
        text = folder.read(_ANSWER).removeprefix(_TOKENS)  # it echoes what it took for the prompt
        return GenerationResult(
            text, {**metrics, **outcome.memory}, self.samples, profile=reports[0]
        )

    def added_tokens(self, settings: DialogSettings, *, after_fill: bool = False) -> int:
        """Return 0: a prompt in tokens is taken as it is."""
        del settings, after_fill
        return 0


RUNTIME = ExecuTorchRuntime


class ExecuTorchDescription(Description):
    """Options of `qnn_llama_runner`, by the names that it has for them.

    Attributes:
        tokenizer: a `tokenizer.json`.
        decoder_model_version: `--decoder_model_version`: `llama3`, `qwen3`.
        eval_mode: `--eval_mode`: 0 decodes the prompt, too, 1 is prefill and decode.
    """

    runtime: Literal["executorch"]
    tokenizer: str
    decoder_model_version: Annotated[str, Field(pattern=r"\A\w+\Z")]
    eval_mode: Literal[0, 1] = 1


def runs(path: Path) -> bool:
    """Return whether it is a description for `qnn_llama_runner`."""
    return describes(path, RUNTIME.name)


def open_model(path: Path) -> "ExecuTorchModel":
    """Open a description."""
    model = ExecuTorchModel(path, read_description(path, ExecuTorchDescription, RUNTIME.name))
    for file in (model.model_path, model.tokenizer):
        if not file.is_file():
            raise HostFileError(str(file), "it is no file")
    return model


@dataclass(frozen=True)
class ExecuTorchModel(DescribedModel[ExecuTorchDescription]):
    """A `.pte` that `qnn_llama_runner` runs; `Model`."""

    runtime: ClassVar[type[ExecuTorchRuntime]] = ExecuTorchRuntime

    @property
    def toolchain(self) -> Mapping[str, str]:
        """Its exporter; the model does not tell the version."""
        return {"toolchain": "executorch"}

    def check_settings(self, settings: DialogSettings) -> None:
        """Refuse settings other than the temperature."""
        if settings.model_dump(exclude={"temp"}, exclude_none=True):
            raise WrongUseError(f"the runtime {self.runtime.name} has no setting but temp")

    def device_bundle(self, device: DeviceProperties) -> Bundle:
        """Return the runner, ExecuTorch's libraries and QNN's, and the model."""
        build = self.build_for(device)
        folders = [build / name for name in _FOLDERS]
        programs = find_programs((PROGRAM,), folders, "ExecuTorch")
        if not programs:
            raise HostFileError(str(build), f"it has no {PROGRAM}: name ExecuTorch's build")
        own = {
            **find_shared_libraries(folders, "ExecuTorch"),
            **programs,
            _MODEL: DeployFile(self.model_path, origin="model"),
            _TOKENIZER: DeployFile(self.tokenizer, origin="model"),
        }
        return self.bundle_with_qnn(device, own)

    def start(
        self, device: Device, properties: DeviceProperties, options: RuntimeOptions
    ) -> ExecuTorchRuntime:
        """See `Model.start`."""
        description = self.description
        command = [*self.environment, f"./{PROGRAM}"]
        command += ["--decoder_model_version", description.decoder_model_version]
        command += ["--eval_mode", str(description.eval_mode), *description.arguments]
        bundle = self.device_bundle(properties)
        return ExecuTorchRuntime(device, properties, bundle, options, command, self)
