"""Containers of the same binaries with another dialog."""

from collections.abc import Mapping
from pathlib import Path

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import GenieConfig
from buildlib.container.writer import ContainerContents, ContainerFile, write_container
from buildlib.targets import parse_target


def repackage(
    plain: GenAIContainer,
    config: GenieConfig,
    folder: Path,
    extras: Mapping[str, ContainerFile] | None = None,
) -> GenAIContainer:
    """Write a container with another configuration over the binaries of `plain`."""
    metadata = plain.metadata
    contents = ContainerContents(
        target=parse_target(metadata.target.name),
        model=metadata.model,
        graphs=metadata.graphs,
        genie_config=config,
        htp_config=plain.htp_config,
        tokenizer=plain.files["tokenizer.json"],
        binaries={name: plain.files[name] for name in plain.genie_config.ctx_bins},
        toolchain=metadata.toolchain,
        options=metadata.options,
        extras=extras or {},
    )
    return write_container(contents, folder)
