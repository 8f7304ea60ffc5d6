"""Descriptions of models for runtimes that are programs of others: a YAML file each.

It names the runtime, the model, the build of its programs for the devices, and their options:

    runtime: llama.cpp
    model: Llama-3.2-1B-Instruct-Q4_0.gguf
    build: pkg-snapdragon/llama.cpp
    device: HTP0

Paths are relative to the file. A `build` is a folder, or one for each ABI.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from buildlib.targets import find_soc, soc_named
from harness.deploy.deployment import DeployFile
from harness.deploy.digests import hash_files
from harness.devices.base import DeviceProperties
from harness.devices.device import Device
from harness.errors import HostFileError, PromptTooLongError, RuntimeChoiceError, WrongUseError
from harness.results.records import ContainerInfo
from harness.runtimes.base import Capability, ModelRole, RuntimeOptions, Window
from harness.runtimes.bundles.bundle import Bundle
from harness.runtimes.bundles.sources import find_qnn
from harness.runtimes.deployed import DeployedRuntime
from harness.runtimes.dialog_settings import DialogSettings
from harness.yaml_files import YamlFile

Word = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"\A[^\x00\n]+\Z")]
_Variable = Annotated[str, Field(pattern=r"\A[A-Za-z_][A-Za-z0-9_]*\Z")]
_RUNTIME = re.compile(rb"^runtime:[ \t]*[\"']?([\w.-]{1,40})", re.MULTILINE)
_BEGINNING = 1 << 16
_SUFFIXES = frozenset({".yaml", ".yml"})
_LIBRARY = re.compile(r".+\.so(\.[0-9.]+)?")


class Description(BaseModel):
    """Keys that all descriptions have.

    Attributes:
        name: of the model in results; by default that of its file.
        files: more files that its programs need, by their names in the run folder.
        environment: variables of the runtime's processes on the device.
        arguments: more options of its programs, as they take them.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", regex_engine="python-re", coerce_numbers_to_str=True
    )

    runtime: str
    model: Word
    build: Word | dict[Word, Word]
    name: Word | None = None
    tokenizer: Word | None = None
    context_length: Annotated[int, Field(ge=8, le=2**24)] | None = None
    files: dict[Word, Word] = Field(default_factory=dict)
    environment: dict[_Variable, Word] = Field(default_factory=dict)
    arguments: tuple[Word, ...] = ()


_Description = TypeVar("_Description", bound=Description)


def describes(path: Path, runtime: str) -> bool:
    """Return whether a file is a description for this runtime."""
    if path.suffix not in _SUFFIXES or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            match = _RUNTIME.search(file.read(_BEGINNING))
    except OSError:
        return False
    return match is not None and match[1] == runtime.encode()


def read_description(path: Path, model: type[_Description], runtime: str) -> _Description:
    """Read a description for a runtime."""
    if not describes(path, runtime):
        raise WrongUseError(
            f"{path} is no YAML file with `runtime: {runtime}`, which names a model and a build"
        )
    return YamlFile.load(path, model).content


@dataclass(frozen=True)
class DescribedModel(ABC, Generic[_Description]):
    """Base of models that a description describes; the rest of `Model` is their own.

    Attributes:
        path: the description's.
        takes_depth: whether its programs can begin with tokens in the context.
    """

    takes_depth: ClassVar[bool] = False
    path: Path
    description: _Description

    def resolve(self, path: str) -> Path:
        """Return a path of the description, from its folder."""
        return self.path.parent / Path(path).expanduser()

    @property
    def model_path(self) -> Path:
        """The model's file or folder."""
        return self.resolve(self.description.model)

    @property
    def tokenizer(self) -> Path:
        """The `tokenizer.json` that the description names."""
        if self.description.tokenizer is None:
            raise WrongUseError(f"this needs the model's tokenizer.json: name it in {self.path}")
        return self.resolve(self.description.tokenizer)

    def named_files(self) -> Iterator[Path]:
        """Yield the files and folders that the description names."""
        for value in self.description.model_dump(exclude={"environment", "arguments"}).values():
            for name in value.values() if isinstance(value, dict) else (value,):
                if isinstance(name, str) and (path := self.resolve(name)).exists():
                    yield path

    @cached_property
    def sha256(self) -> str:
        """Hash of the model's contents, and of the description without its paths."""
        paths = sorted(model_files(self.model_path).items())
        digests = hash_files({path for _, path in paths})
        options = self.description.model_dump_json(
            exclude={"model", "build", "tokenizer", "files", "name"}
        )
        parts = [options, *(f"{name} {digests[path].sha256}" for name, path in paths)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def context_length(self) -> int | None:
        """Tokens of a context; None if unknown."""
        return self.description.context_length

    @property
    def toolchain(self) -> Mapping[str, str]:
        """Unknown, where the model's files do not tell their maker."""
        return {}

    @property
    def info(self) -> ContainerInfo:
        """The model in the results store."""
        return self.container_info()

    def container_info(
        self,
        *,
        name: str = "",
        precision: str | None = None,
        parameters: int | None = None,
    ) -> ContainerInfo:
        """Describe the model in the results store; it is for any device.

        Args:
            name: that the model itself has; the description's own comes before it.
        """
        files = model_files(self.model_path).values()
        return ContainerInfo(
            model=self.description.name or name or self.model_path.stem,
            sha256=self.sha256,
            target="",
            ars=(),
            cl=self.context_length or 0,
            n_splits=0,
            precision=precision,
            size_bytes=sum(path.stat().st_size for path in files),
            parameters=parameters,
        )

    def check_dialog(
        self,
        settings: DialogSettings,
        prompt_tokens: int,
        new_tokens: int,
        *,
        depth_tokens: int = 0,
    ) -> None:
        """See `Model.check_dialog`."""
        self.check_settings(settings)
        if depth_tokens and not self.takes_depth:
            runtime = self.description.runtime
            raise WrongUseError(f"the runtime {runtime} has no depth: leave it out")
        tokens, most = depth_tokens + prompt_tokens, self.context_length
        if most is not None and tokens + new_tokens > most:
            raise PromptTooLongError(tokens, new_tokens, most - 1, most)

    @abstractmethod
    def check_settings(self, settings: DialogSettings) -> None:
        """Refuse settings that its programs do not have."""

    def check_fit(self, device: DeviceProperties) -> None:
        """See `Model.check_fit`."""
        self.device_bundle(device)

    @abstractmethod
    def device_bundle(self, device: DeviceProperties) -> Bundle:
        """Return programs, libraries and model for a device; refuse one that it is not for."""

    def build_for(self, device: DeviceProperties) -> Path:
        """Return the folder with the programs for a device."""
        build = self.description.build
        if not isinstance(build, str):
            if device.abi not in build:
                abis = ", ".join(build)
                reason = f"{self.path} has builds for {abis}, and the device is {device.abi}"
                raise RuntimeChoiceError(device.serial, reason)
            build = build[device.abi]
        folder = self.resolve(build)
        if not folder.is_dir():
            raise HostFileError(str(folder), f"it is no folder with a build for {device.abi}")
        return folder

    def bundle(self, device: DeviceProperties, files: Mapping[str, DeployFile]) -> Bundle:
        """Return files as a bundle for a device, with those that are described."""
        description = self.description
        more = {
            name: DeployFile(self.resolve(path), executable=True, origin=str(self.path))
            for name, path in description.files.items()
        }
        return Bundle(device.abi, soc_named(device.soc), {**files, **more})

    def bundle_with_qnn(self, device: DeviceProperties, files: Mapping[str, DeployFile]) -> Bundle:
        """Return the same, with QNN's libraries where the files have none."""
        bundle = self.bundle(device, files)
        if "libQnnHtp.so" in bundle.files:
            return bundle
        return bundle.add({**find_qnn(device.abi, find_soc(device.soc)).files, **bundle.files})

    @property
    def environment(self) -> tuple[str, ...]:
        """Words before a program that give it the described variables."""
        variables = self.description.environment
        return ("env", *(f"{key}={value}" for key, value in variables.items())) if variables else ()

    def windows(
        self, text: str, most: int | None = None, role: ModelRole = "target"
    ) -> Sequence[Window]:
        """See `Model.windows`."""
        del text, most, role
        raise WrongUseError(f"{self.path}: its runtime scores no texts")


class ProgramRuntime(DeployedRuntime):
    """Base of runtimes that run a described model by one program.

    Attributes:
        libraries: of its own, whose hashes are its versions.

    Args:
        bundle: holds the program, its libraries and the model.
        command: the program, with the options that all its processes share.
        model: that it runs; its tokenizer is on this host.
    """

    libraries: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        device: Device,
        properties: DeviceProperties,
        bundle: Bundle,
        options: RuntimeOptions,
        command: Sequence[str],
        model: DescribedModel[Any],
    ) -> None:
        super().__init__(device, properties, bundle, options)
        self._command = tuple(command)
        self._model = model

    def runner(self, capability: Capability) -> str:
        """Name the program, which is the same for all."""
        del capability
        return next(word for word in self._command if word.startswith("./")).rpartition("/")[2]

    def versions(self) -> Mapping[str, str]:
        """Return the hashes of its libraries, and of the user's files; deploy first if needed."""
        hashes = {name.rpartition("/")[2]: self.sha256_of(name) for name in self.libraries}
        own = {name: f"sha256:{sha256[:16]}" for name, sha256 in hashes.items() if sha256}
        return own | self.pushed()


def model_files(path: Path) -> dict[str, Path]:
    """Return the files of a model, by their names beneath it; a file has its own name."""
    if path.is_file():
        return {path.name: path}
    files = {str(each.relative_to(path)): each for each in path.rglob("*") if each.is_file()}
    if not files:
        raise HostFileError(str(path), "it is neither a file nor a folder with a model")
    return files


def find_programs(
    names: Sequence[str], folders: Sequence[Path], origin: str
) -> dict[str, DeployFile]:
    """Find programs in the folders of a build; those that are not there are left out."""
    paths = ((name, folder / name) for name in names for folder in reversed(folders))
    return {
        name: DeployFile(path.resolve(), executable=True, origin=origin)
        for name, path in paths
        if path.is_file()
    }


def find_shared_libraries(folders: Sequence[Path], origin: str) -> dict[str, DeployFile]:
    """Find all shared libraries in the folders of a build, by their names."""

    def found() -> Iterator[Path]:
        for folder in reversed(folders):
            if folder.is_dir():
                yield from sorted(folder.iterdir())

    return {
        path.name: DeployFile(path.resolve(), origin=origin)
        for path in found()
        if _LIBRARY.fullmatch(path.name) and path.is_file()
    }
