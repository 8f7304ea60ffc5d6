"""Containers that Genie runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from buildlib.container.genie_config import GenieConfig
from buildlib.container.manifest import GENIE_CONTRACT
from harness.errors import WrongUseError
from harness.runtimes.container_model import ContainerModel
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.files import open_container
from harness.runtimes.genie.configuration import check_depth, config_of
from harness.runtimes.genie.runtime import GenieRuntime
from harness.runtimes.genie.speculation import refuse_wrong_dialogs

RUNTIME = GenieRuntime


def runs(path: Path) -> bool:
    """Return whether it is a folder, as containers are, or nothing yet."""
    return not path.is_file()


def open_model(path: Path) -> "GenieModel":
    """Open a container; see `open_container`.

    Raises:
        WrongUseError: its graphs are of another contract than Genie's.
    """
    container = open_container(path)
    contract = container.metadata.contract
    if contract != GENIE_CONTRACT:
        raise WrongUseError(
            f"{path} holds graphs of the contract {contract}, which Genie does not run: use "
            "--runtime graph"
        )
    return GenieModel(container)


@dataclass(frozen=True)
class GenieModel(ContainerModel):
    """A container that Genie runs; `Model`."""

    runtime: ClassVar[type[GenieRuntime]] = GenieRuntime

    def dialog_config(self, settings: DialogSettings, depth_tokens: int) -> GenieConfig:
        """Return the configuration of a dialog; refuse what Genie cannot hold."""
        config = config_of(settings, self.container)
        if depth_tokens:
            check_depth(config)
        refuse_wrong_dialogs(config, self.container)
        return config
