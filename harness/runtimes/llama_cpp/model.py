"""GGUF files that llama.cpp runs, each described by a YAML file."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from buildlib.gguf import GgufHeader
from harness.deploy.deployment import DeployFile
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import HostFileError, WrongUseError
from harness.results.records import ContainerInfo
from harness.runtimes.base import ModelRole, RuntimeOptions, Window
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.description import (
    DescribedModel,
    Description,
    describes,
    find_programs,
    find_shared_libraries,
    read_description,
)
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.llama_cpp.runtime import MODEL, PROGRAMS, LlamaCppRuntime
from harness.runtimes.tokenizer import load_tokenizer

RUNTIME = LlamaCppRuntime
_FOLDERS = (".", "bin", "lib", "lib64")
_SLACK = 8
"""Tokens after the last window: what is cut off may change the tokens before it."""


class LlamaCppDescription(Description):
    """Options of llama.cpp's programs, by the names that these have.

    Attributes:
        device: `--device`: `HTP0`, `GPUOpenCL`, or `none` for the CPU; by default its own choice.
        n_gpu_layers: `-ngl`: layers to put there.
        threads: `-t`.
        flash_attn: `-fa`.
        cache_type: `-ctk` and `-ctv`: type of the KV cache.
    """

    runtime: Literal["llama.cpp"]
    device: Annotated[str, Field(pattern=r"\A[\w,/.:-]+\Z")] | None = None
    n_gpu_layers: Annotated[int, Field(ge=-1, le=10_000)] | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    flash_attn: Literal["on", "off", "auto"] | None = None
    cache_type: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] | None = None


def runs(path: Path) -> bool:
    """Return whether it is a description for llama.cpp."""
    return describes(path, RUNTIME.name)


def open_model(path: Path) -> "LlamaCppModel":
    """Open a description and the GGUF that it names.

    Raises:
        HostFileError: the description cannot be read.
        InputFileError: the GGUF cannot.
        WrongUseError: it is no description for llama.cpp.
    """
    model = LlamaCppModel(path, read_description(path, LlamaCppDescription, RUNTIME.name))
    _ = model.header
    return model


@dataclass(frozen=True)
class LlamaCppModel(DescribedModel[LlamaCppDescription]):
    """A GGUF that llama.cpp runs; `Model`."""

    runtime: ClassVar[type[LlamaCppRuntime]] = LlamaCppRuntime
    takes_depth: ClassVar[bool] = True

    @cached_property
    def header(self) -> GgufHeader:
        """Header of the GGUF."""
        return GgufHeader.read(self.model_path)

    @property
    def context_length(self) -> int:
        """Tokens of a context: as described, or as the GGUF says."""
        length = self.description.context_length or self.header.context_length
        if length is None:
            raise WrongUseError(f"{self.path} names no context_length, and its GGUF has none")
        return length

    @property
    def info(self) -> ContainerInfo:
        """The GGUF in the results store."""
        header = self.header
        return self.container_info(
            name=header.name,
            precision=header.precision or None,
            parameters=header.parameters or None,
        )

    @property
    def toolchain(self) -> Mapping[str, str]:
        """The format: a GGUF does not tell the version of its converter."""
        return {"toolchain": "gguf"}

    def check_settings(self, settings: DialogSettings) -> None:
        """Refuse settings that llama.cpp does not have."""
        for name in ("stop", "lora", "genie_config"):
            if getattr(settings, name) is not None:
                raise WrongUseError(f"{name}: the runtime {self.runtime.name} has no such setting")

    def windows(
        self, text: str, most: int | None = None, role: ModelRole = "target"
    ) -> Sequence[Window]:
        """Cut a text as llama-perplexity does: whole contexts, whose first token becomes bos.

        The second half of each is scored: tokens CL/2 + 1 to CL - 1, counted from 0.
        """
        if role != "target":
            raise WrongUseError("a GGUF has no draft model")
        size = self.context_length
        text = text.replace("\0", " ")
        encoding = load_tokenizer(self.tokenizer).encode(text, add_special_tokens=False)
        ids = [-1, *encoding.ids]  # for bos, which llama.cpp puts in front
        starts = [0, *(start for start, _ in encoding.offsets)]
        if len(ids) < 2 * size:
            raise WrongUseError(
                f"the text has {len(ids)} tokens, and llama-perplexity wants two contexts of {size}"
            )
        count = min(most or len(ids), len(ids) // size)
        ends = [starts[number * size] for number in range(1, count)]
        rest = max(count, 2) * size + _SLACK
        ends.append(starts[rest] if rest < len(starts) else len(text))
        half = size // 2 + 1
        return [
            Window(
                text[begin:end],
                scored=tuple(ids[number * size + half : (number + 1) * size]),
                context=tuple(ids[number * size + 1 : number * size + half]),
            )
            for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]

    def device_bundle(self, device: DeviceProperties) -> Bundle:
        """Return the programs and libraries of llama.cpp, and the GGUF."""
        build = self.build_for(device)
        folders = [build / name for name in _FOLDERS]
        programs = find_programs(PROGRAMS, folders, "llama.cpp")
        if not programs:
            names = ", ".join(PROGRAMS)
            raise HostFileError(str(build), f"neither it nor its bin has one of {names}")
        libraries = find_shared_libraries(folders, "llama.cpp")
        model = DeployFile(self.model_path, origin="model")
        return self.bundle(device, {**libraries, **programs, MODEL: model})

    def start(
        self, device: Device, properties: DeviceProperties, options: RuntimeOptions
    ) -> LlamaCppRuntime:
        """See `Model.start`."""
        said = self.description
        named = {
            "--device": said.device,
            "-ngl": said.n_gpu_layers,
            "-t": said.threads,
            "-fa": said.flash_attn,
            "-ctk": said.cache_type,
            "-ctv": said.cache_type,
        }
        flags = [(flag, str(value)) for flag, value in named.items() if value is not None]
        return LlamaCppRuntime(
            device,
            properties,
            self.device_bundle(properties),
            options,
            arguments=(*itertools.chain(*flags), *said.arguments),
            environment=self.environment,
            context_length=self.context_length,
        )
