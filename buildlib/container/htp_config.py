"""`htp_backend_ext_config.json`: devices, context and memory for QNN's HTP extensions.

`context` is an object in AI Hub's files and an array of objects in the newer documentation: both
are read, and written as they were.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from buildlib.config_model import ConfigModel, One, OneOrSeveral, Several, Text
from buildlib.toolchains.htp_extensions import (
    HtpContextConfig,
    HtpDeviceConfig,
    HtpGraphOptions,
    HtpGroupContextConfig,
    HtpMemoryConfig,
    HtpOptions,
)


class HtpGraphEntry(HtpGraphOptions):
    """Compiler options of graphs by their names."""

    graph_names: tuple[str, ...] | None = None


class BackendExtensions(ConfigModel):
    """The library that reads a file of extensions, and that file."""

    shared_library_path: Text
    config_file_path: Text | None = None


class BackendExtensionsConfig(ConfigModel):
    """The outer file, which qnn-net-run and qnn-context-binary-generator take."""

    backend_extensions: BackendExtensions


class HtpConfig(HtpOptions):
    """`htp_backend_ext_config.json`."""

    SECTION: ClassVar = ""

    devices: tuple[HtpDeviceConfig, ...] | None = None
    memory: HtpMemoryConfig | None = None
    context: (
        Annotated[
            Annotated[HtpContextConfig, One] | Annotated[tuple[HtpContextConfig, ...], Several],
            OneOrSeveral,
        ]
        | None
    ) = None
    graphs: tuple[HtpGraphEntry, ...] | None = None
    group_context: Annotated[HtpGroupContextConfig | None, Field(alias="groupContext")] = None

    @property
    def contexts(self) -> tuple[HtpContextConfig, ...]:
        """`context` in either of its forms."""
        if self.context is None:
            return ()
        return self.context if isinstance(self.context, tuple) else (self.context,)

    def without_sharing(self) -> "HtpConfig":
        """Return a copy with contexts that share no weights."""
        off = {"weight_sharing_enabled": False, "lora_weight_sharing": None}
        contexts = tuple(context.model_copy(update=off) for context in self.contexts)
        several = isinstance(self.context, tuple)
        return self.model_copy(
            update={"context": contexts if several else next(iter(contexts), None)}
        )
