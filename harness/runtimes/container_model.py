"""Containers as models that runtimes run, and the common part of these runtimes."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.toolchains.base import emulated_s
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import WrongUseError
from harness.results.records import ContainerInfo
from harness.runtimes.base import Model, ModelRole, Runtime, RuntimeOptions, Window
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.context_limit import ContextLimit
from harness.runtimes.deployed import DeployedRuntime
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.files import check_fit
from harness.runtimes.tokenizer import load_tokenizer
from harness.runtimes.windows import cut_windows

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
