"""Containers as models, the devices that can run them, and what their runtimes have in common."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.genie_limits import find_limits
from buildlib.container.text_embedding import Configuration
from buildlib.targets import Target, find_soc, parse_target
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import RuntimeChoiceError, WrongUseError
from harness.results.records import ContainerInfo
from harness.runtimes.base import Model, ModelRole, Runtime, RuntimeOptions, Window
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.deployed import DeployedRuntime
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.tokenizer import ContextLimit, cut_windows, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_EMULATOR_ABI = "x86_64"
_HARDWARE_ABIS = ("arm64-v8a", "aarch64")  # Android's and Linux's name for one thing

_QNN_API = ("api.py", "contracts.py", "refusal.py", "structures.py")


def open_container(folder: Path) -> GenAIContainer:
    """Load a container that is to run, before any device is asked for."""
    container = GenAIContainer.load(folder)
    check_limits(container.configuration, str(container.path), target_of(container))
    return container


def check_limits(config: Configuration, path: str, target: Target) -> None:
    """Refuse a configuration that its target cannot run, though Genie's parser takes it."""
    limits = find_limits(config, emulator=target.emulator)
    if limits:
        raise WrongUseError(f"{path} cannot run: {'; '.join(map(str, limits))}")


def check_fit(container: GenAIContainer, device: DeviceProperties) -> None:
    """Refuse a container that was compiled for something else: loading it has no defined result."""
    target = target_of(container)
    check_limits(container.configuration, str(container.path), target)
    abis = (_EMULATOR_ABI,) if target.emulator else _HARDWARE_ABIS
    if device.abi not in abis:
        purpose = f"the container is for {target}, which is {abis[0]}"
        emulated = f"{device.soc or target.soc.name}:emulator"
        hint = emulated if device.abi == _EMULATOR_ABI else device.soc or "its SoC"
        raise RuntimeChoiceError(
            device.serial,
            f"{purpose}, and the device is {device.abi or 'of no known ABI'}: build it for {hint}",
        )
    if device.hexagon is not None and device.hexagon != target.soc.dsp_arch:
        raise RuntimeChoiceError(
            device.serial,
            f"the container is for {target} (Hexagon {target.soc.dsp_arch}), and the device is a "
            f"{device.soc} ({device.hexagon}): build it for that",
        )
    vtcm_mb = container.metadata.options.get("graphs.vtcm_size_in_mb")
    if device.hexagon is not None and isinstance(vtcm_mb, int):
        soc = find_soc(device.soc)
        if vtcm_mb > soc.vtcm_mb:
            raise RuntimeChoiceError(
                device.serial,
                f"the container's graphs take {vtcm_mb} MiB of VTCM, and {soc.name} has "
                f"{soc.vtcm_mb}: build it for {soc.name}",
            )


def target_of(container: GenAIContainer) -> Target:
    """Return the target that the container was built for."""
    return parse_target(container.metadata.target.name)


def qnn_api_files() -> Mapping[str, Path]:
    """Return the modules of QNN's C API that device scripts import, by name in the run folder."""
    qnn = resources.files("buildlib.toolchains.qnn")
    # The packages around the API have no code of their own there.
    folders = ("buildlib", "buildlib/toolchains", "buildlib/toolchains/qnn")
    files = {f"{folder}/__init__.py": Path(str(qnn / "__init__.py")) for folder in folders}
    return files | {f"{folders[-1]}/{name}": Path(str(qnn / name)) for name in _QNN_API}


class ContainerRuntime(DeployedRuntime, Runtime):
    """Base of runtimes of containers.

    Raises:
        RuntimeChoiceError: the container is not for this device.
        GenieMissingError: this machine has no libraries for it.
    """

    @staticmethod
    @abstractmethod
    def bundle_of(container: GenAIContainer, abi: str) -> Bundle:
        """Collect the files of a container for devices of an ABI."""

    def __init__(
        self,
        device: Device,
        properties: DeviceProperties,
        container: GenAIContainer,
        options: RuntimeOptions | None = None,
    ) -> None:
        check_fit(container, properties)
        bundle = self.bundle_of(container, properties.abi)
        super().__init__(device, properties, bundle, options or RuntimeOptions(), container)
        self._container = container
        self._properties = properties

    def _emulated_s(self, new_tokens: int) -> float:
        if not self._properties.emulator:
            return 0.0
        from buildlib.toolchains.base import emulated_s

        graphs = self._container.metadata.graphs
        prefill = -(-graphs.context_length // max(graphs.auto_regression_numbers))
        return emulated_s(self._container.sizes_by_kind["binary"], prefill + new_tokens)

    @functools.cached_property
    def _limit(self) -> ContextLimit:
        return ContextLimit.of(self._container)

    @functools.cached_property
    def _tokenizer(self) -> "Tokenizer":
        return load_tokenizer(self._container.files["tokenizer.json"])


@dataclass(frozen=True)
class ContainerModel(ABC):
    """A container, as `Model` has it; base of the models of runtimes that run containers."""

    runtime: ClassVar[type[ContainerRuntime]]
    container: GenAIContainer

    @property
    def path(self) -> Path:
        """The container's folder."""
        return self.container.path

    @property
    def info(self) -> ContainerInfo:
        """The container in the results store."""
        metadata = self.container.metadata
        return ContainerInfo(
            model=metadata.model.name,
            sha256=metadata.container_sha256,
            target=metadata.target.name,
            ars=metadata.graphs.auto_regression_numbers,
            cl=metadata.graphs.context_length,
            n_splits=metadata.graphs.splits,
            precision=self.container.precision,
            size_bytes=metadata.size_bytes,
            parameters=metadata.model.parameters,
            quantization_loss=()
            if metadata.loss is None
            else (str(metadata.loss), *metadata.loss.lines),
        )

    @property
    def toolchain(self) -> Mapping[str, str]:
        """Versions of its compiler."""
        return self.container.metadata.toolchain

    @property
    def tokenizer(self) -> Path:
        """The container's `tokenizer.json`."""
        return self.container.files["tokenizer.json"]

    def check_dialog(
        self,
        settings: DialogSettings,
        prompt_tokens: int,
        new_tokens: int,
        *,
        depth_tokens: int = 0,
    ) -> None:
        """See `Model.check_dialog`."""
        config = self.dialog_config(settings, depth_tokens)
        limit = ContextLimit.of(self.container).for_dialog(config)
        limit.check(depth_tokens + prompt_tokens, new_tokens)

    @abstractmethod
    def dialog_config(self, settings: DialogSettings, depth_tokens: int) -> GenieConfig:
        """Return the configuration of a dialog; refuse one that its runtime cannot hold."""

    def bundle(self, abi: str) -> Bundle:
        """Return the files of its runtime for devices of an ABI."""
        return self.runtime.bundle_of(self.container, abi)

    def windows(
        self, text: str, most: int | None = None, role: ModelRole = "target"
    ) -> Sequence[Window]:
        """Cut a text into windows of the container's context length; see `Model.windows`."""
        container = self.container
        limit = ContextLimit.of_draft(container) if role == "draft" else ContextLimit.of(container)
        return cut_windows(text, self.tokenizer, limit, most, bos=has_bos(container))

    def start(
        self, device: Device, properties: DeviceProperties, options: RuntimeOptions
    ) -> ContainerRuntime:
        """See `Model.start`."""
        return self.runtime(device, properties, self.container, options)

    def check_fit(self, device: DeviceProperties) -> None:
        """See `Model.check_fit`."""
        check_fit(self.container, device)


def has_bos(container: GenAIContainer) -> bool:
    """Return whether Genie puts a token before each text."""
    return container.genie_config.dialog.context.bos_token >= 0


def container_of(model: Model) -> GenAIContainer:
    """Return the container that a model is."""
    if not isinstance(model, ContainerModel):
        raise WrongUseError(f"{model.path} is no container, which this needs")
    return model.container
