"""A runtime for tests: it runs shell scripts, and its speed is the number that they print."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from buildlib.targets import find_soc
from harness.deploy.deployment import DeployFile
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import WrongUseError
from harness.results.records import ContainerInfo
from harness.runtimes import registry
from harness.runtimes.base import Capability, GenerationResult, RuntimeOptions, SpeedRequest
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.deployed import DeployedRuntime
from harness.runtimes.dialog_settings import DialogSettings


class StopwatchRuntime(DeployedRuntime):
    """Prints a speed for the numbers of tokens that it is given."""

    name: ClassVar[str] = "stopwatch"

    def runner(self, capability: Capability) -> str:
        del capability
        return "model.sh"

    def versions(self) -> Mapping[str, str]:
        return {"stopwatch": "1"}

    def measure_speed(self, request: SpeedRequest) -> Iterator[GenerationResult]:
        folder = self.folder()
        command = ["sh", "model.sh", str(request.prompt_tokens), str(request.new_tokens)]
        for _ in range(request.repetitions):
            outcome = folder.run(command, name="model.sh", timeout_s=self.limit_s(), stdout="speed")
            prefill, decode = map(float, folder.read("speed").split())
            speeds = {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode}
            yield GenerationResult("", {**speeds, **outcome.memory})


RUNTIME = StopwatchRuntime


@dataclass(frozen=True)
class Script:
    """A script, as `Model` has it."""

    path: Path
    runtime: ClassVar[type[StopwatchRuntime]] = StopwatchRuntime

    @property
    def info(self) -> ContainerInfo:
        sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()
        return ContainerInfo(
            model=self.path.stem, sha256=sha256, target="", ars=(), cl=0, n_splits=0
        )

    @property
    def toolchain(self) -> Mapping[str, str]:
        return {"toolchain": "an editor"}

    @property
    def tokenizer(self) -> Path:
        raise WrongUseError(f"{self.path} has no tokenizer")

    def check_dialog(
        self,
        settings: DialogSettings,
        prompt_tokens: int,
        new_tokens: int,
        *,
        depth_tokens: int = 0,
    ) -> None:
        del prompt_tokens, new_tokens, depth_tokens
        if settings.lora:
            raise WrongUseError("scripts have no adapters")

    def check_fit(self, device: DeviceProperties) -> None:
        del device

    def start(
        self, device: Device, properties: DeviceProperties, options: RuntimeOptions
    ) -> StopwatchRuntime:
        files = {"model.sh": DeployFile(self.path, origin="the test")}
        bundle = Bundle(properties.abi, find_soc("SM8750"), files)
        return StopwatchRuntime(device, properties, bundle, options)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model of this runtime, which processes 2 tokens/s for each of its prompt."""
    monkeypatch.setattr(registry, "_MODULES", {**registry._MODULES, "stopwatch": __name__})
    path = tmp_path / "model.sh"
    path.write_text('echo "$(($1 * 2)) $2"\n')
    registry.runtimes.cache_clear()
    yield path
    registry.runtimes.cache_clear()


def runs(path: Path) -> bool:
    return path.suffix == ".sh"


def open_model(path: Path) -> Script:
    return Script(path)
