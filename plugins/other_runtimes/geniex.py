"""geniex-bench, the benchmark of GenieX: llama.cpp and QAIRT behind one C API.

Source: https://github.com/qualcomm/GenieX (BSD-3-Clause), `sdk/benchmark/README.md` and its
`--help`; the report of a cell is schema 2 to 6, which differ in what they add.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from harness.deploy.deployment import DeployFile
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import HostFileError, RuntimeOutputError, WrongUseError
from harness.importing.json_files import canonical, of_entries
from harness.importing.records import FileFormat, ForeignRun
from harness.runtimes.base import GenerationResult, RuntimeOptions, SpeedRequest
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.description import (
    DescribedModel,
    Description,
    ProgramRuntime,
    describes,
    model_files,
    read_description,
)
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.json_values import UNREADABLE, Entry, is_scalar, number, reason_of

_METRICS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "ttft_s": ("ttft_us", 1e-6),
        "prefill_tokens_per_s": ("prefill_tps", 1.0),
        "decode_tokens_per_s": ("decode_tps", 1.0),
        "prompt_tokens": ("prompt_tokens", 1.0),
        "generated_tokens": ("gen_tokens", 1.0),
    }
)


def figures_of(run: Entry) -> dict[str, float]:
    """Return the metrics of one of a cell's `runs`.

    Raises:
        KeyError, ValueError: a figure is missing, or is no number.
    """
    return {
        metric: number(run[key]) * scale
        for metric, (key, scale) in _METRICS.items()
        if run[key] or metric == "generated_tokens"  # 0: there was no such phase
    }


_PROGRAM = "bin/geniex-bench"
_LIBRARIES = "lib"
_MODEL = "model"
_REPORT = "report.json"
# As notes/run.md and the README have it; relative to the run folder.
_ENVIRONMENT = ("LD_LIBRARY_PATH=./lib:./lib/llama_cpp", "GENIEX_PLUGIN_PATH=./lib")


class GeniexBenchRuntime(ProgramRuntime):
    """A model on a device, measured by geniex-bench; `Runtime`.

    The bundle is an installed GenieX (`bin`, `lib`), with the model beneath `model/`.
    """

    name: ClassVar[str] = "geniex-bench"
    libraries: ClassVar[tuple[str, ...]] = (f"{_LIBRARIES}/libgeniex.so",)

    def measure_speed(self, request: SpeedRequest) -> Iterator[GenerationResult]:
        """Yield the runs of one process, after a warm-up that it does not report.

        The warm-up is in the same process, so that no sample of the device belongs to one run. The
        report comes with the first.
        """
        command = [*self._command, "-p", str(request.prompt_tokens)]
        command += ["-n", str(request.new_tokens)]
        command += ["-r", str(request.repetitions), "--output-json", _REPORT]
        command += [] if request.warmup is None else ["--warmup", str(request.warmup)]
        folder = self.folder()
        timeout_s = self.limit_s()
        outcome = folder.run(command, name=self.name, timeout_s=timeout_s)
        report = folder.read(_REPORT)
        try:
            runs = [figures_of(run) for run in json.loads(report)["runs"]]
        except UNREADABLE as error:
            reason = f"unreadable report of geniex-bench: {reason_of(error)}"
            raise RuntimeOutputError(self.device.serial, reason) from error
        if len(runs) != request.repetitions:
            reason = f"geniex-bench reported {len(runs)} runs of {request.repetitions}"
            raise RuntimeOutputError(self.device.serial, reason)
        profiles = [report, *[""] * (len(runs) - 1)]
        for metrics, profile in zip(runs, profiles, strict=True):
            yield GenerationResult("", {**metrics, **outcome.memory}, profile=profile)


RUNTIME = GeniexBenchRuntime


class GeniexDescription(Description):
    """Options of geniex-bench, by the names that it has for them.

    Attributes:
        plugin: `--plugin`.
        device: `--device`.
        n_gpu_layers: `-ngl`.
        threads: `-t`.
    """

    runtime: Literal["geniex-bench"]
    plugin: Literal["llama_cpp", "qairt"]
    device: Literal["cpu", "gpu", "npu", "hybrid", "auto"] = "auto"
    n_gpu_layers: Annotated[int, Field(ge=-1, le=10_000)] | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None


def runs(path: Path) -> bool:
    """Return whether it is a description for geniex-bench."""
    return describes(path, RUNTIME.name)


def open_model(path: Path) -> "GeniexModel":
    """Open a description."""
    model = GeniexModel(path, read_description(path, GeniexDescription, RUNTIME.name))
    model_files(model.model_path)
    return model


@dataclass(frozen=True)
class GeniexModel(DescribedModel[GeniexDescription]):
    """A GGUF, or a bundle of QAIRT, that geniex-bench runs; `Model`."""

    runtime: ClassVar[type[GeniexBenchRuntime]] = GeniexBenchRuntime

    def check_settings(self, settings: DialogSettings) -> None:
        """Refuse all settings."""
        if settings != DialogSettings():
            raise WrongUseError(f"the runtime {self.runtime.name} measures greedy dialogs alone")

    def device_bundle(self, device: DeviceProperties) -> Bundle:
        """Return an installed GenieX, and the model."""
        build = self.build_for(device)
        if not (build / _PROGRAM).is_file():
            raise HostFileError(str(build), f"it has no {_PROGRAM}: name the installed GenieX")
        libraries = {
            f"{_LIBRARIES}/{name}": DeployFile(path, origin="GenieX")
            for name, path in model_files(build / _LIBRARIES).items()
        }
        model = {
            f"{_MODEL}/{name}": DeployFile(path, origin="model")
            for name, path in model_files(self.model_path).items()
        }
        program = DeployFile(build / _PROGRAM, executable=True, origin="GenieX")
        return self.bundle(device, {**libraries, **model, _PROGRAM: program})

    def start(
        self, device: Device, properties: DeviceProperties, options: RuntimeOptions
    ) -> GeniexBenchRuntime:
        """See `Model.start`."""
        description, name = self.description, self.model_path.name
        model = f"{_MODEL}/{name}" if self.model_path.is_file() else _MODEL
        arguments = ["--plugin", description.plugin, "--device", description.device, "-m", model]
        flags = {
            "-c": description.context_length,
            "-t": description.threads,
            "-ngl": description.n_gpu_layers,
        }
        for flag, value in flags.items():
            arguments += [] if value is None else [flag, str(value)]
        bundle = self.device_bundle(properties)
        command = ("env", *_ENVIRONMENT, *self.environment, f"./{_PROGRAM}")
        words = (*command, *arguments, *description.arguments)
        return GeniexBenchRuntime(device, properties, bundle, options, words, self)


def read_geniex_bench(line: int, entry: Entry) -> Iterator[ForeignRun]:
    """Read one cell of geniex-bench, a repetition for each of its runs."""
    path = PureWindowsPath(str(entry["model_path"]))
    params = {key: value for key, value in entry["params"].items() if is_scalar(value)}
    versions = {name: entry.get(f"{name}_version") for name in ("qairt", "llama_cpp")}
    yield ForeignRun(
        line,
        "geniex-bench",
        source=canonical(entry),
        model=path.stem if path.suffix == ".gguf" else path.name,
        device_model=f"{entry['device']} ({entry['plugin']})",
        container_bytes=int(number(entry.get("model_size_bytes") or 0)) or None,
        new_tokens=int(number(params.pop("n_gen"))),
        settings=params,
        versions={name: str(version) for name, version in versions.items() if version},
        labels={} if entry["cell_id"] == "cell" else {"cell": str(entry["cell_id"])},
        repetitions=[figures_of(run) for run in entry["runs"]],
    )


FORMATS = (FileFormat('"prefill_tps"', of_entries(read_geniex_bench)),)
