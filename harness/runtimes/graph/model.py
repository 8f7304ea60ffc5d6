"""Containers that the graph runtime runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from buildlib.container.genie_config import GenieConfig
from harness.devices.base import DeviceProperties
from harness.errors import RuntimeChoiceError, WrongUseError
from harness.runtimes.bundles.python import NAMED, find_python
from harness.runtimes.bundles.sources import ANDROID
from harness.runtimes.container_model import ContainerModel
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.files import open_container
from harness.runtimes.graph.runtime import RUNNER, GraphRuntime, plain_config

RUNTIME = GraphRuntime


def runs(path: Path) -> bool:
    """Return whether it is a folder, as containers are, or nothing yet."""
    return not path.is_file()


def open_model(path: Path) -> "GraphModel":
    """Open a container; see `open_container`.

    Raises:
        ContainerError: it holds a text encoder.
        WrongUseError: its context slides, which Genie alone does.
    """
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
