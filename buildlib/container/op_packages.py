"""Op packages: libraries with operations of the user's own, one for each kind of processor.

    op_packages:
      - name: QnnLLaMAPackage
        interface_provider: LLaMAPackageInterfaceProvider
        targets:
          x86_64: x86_64-linux-clang/libQnnLLaMAPackage.so
          aarch64-android: aarch64-android/libQnnLLaMAPackage.so
          hexagon-v75: hexagon-v75/libQnnLLaMAPackage.so

Paths are those of the user's files in options and recipes, and names in the container in its
manifest. The container holds the libraries of its own target, under the names that mllm's documents
and code (https://github.com/UbiquitousLearning/mllm at cb4add08, MIT) give them on a device:
`libQnnLLaMAPackage_CPU.so` of the processor that calls QNN, and `libQnnLLaMAPackage_HTP.so`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from buildlib.elf import read_elf
from buildlib.errors import InputFileError, InvalidOptionError
from buildlib.paths import user_path
from buildlib.targets import Target

if TYPE_CHECKING:
    from buildlib.toolchains.base import OpPackageLibrary, Toolchain

KEY: Final = "op_packages"
EMULATOR: Final = "x86_64"
ANDROID: Final = "aarch64-android"
LINUX: Final = "aarch64-oe-linux-gcc11.2"
_HEXAGON = "hexagon-"
TargetKey = Annotated[
    str, Field(pattern=rf"\A({EMULATOR}|{ANDROID}|{re.escape(LINUX)}|{_HEXAGON}v[0-9]{{2}})\z")
]
Identifier = Annotated[str, Field(pattern=r"\A[A-Za-z_][A-Za-z0-9_]{0,199}\z")]
Side = Literal["CPU", "HTP"]


@dataclass(frozen=True, slots=True)
class Registration:
    """A library that QNN registers on a device.

    Attributes:
        file: its name in the container, and in the run folder.
        provider: its function that provides the interface.
        side: QNN's name of the target.
    """

    file: str
    provider: str
    side: Side

    def __str__(self) -> str:
        return f"{self.file}:{self.provider}:{self.side}"


class OpPackage(BaseModel):
    """An op package.

    Attributes:
        name: of its libraries, without `lib` and `.so`.
        interface_provider: the function of its libraries that provides the interface.
        targets: its library for each of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Identifier
    interface_provider: Identifier
    targets: Annotated[Mapping[TargetKey, str], Field(min_length=1)]

    def resolved(self, folder: Path) -> "OpPackage":
        """Return the package with the paths of its libraries below a folder."""
        paths = {key: str(folder / user_path(path)) for key, path in self.targets.items()}
        return self.model_copy(update={"targets": paths})

    def for_target(self, target: Target) -> "OpPackage":
        """Return the package with the libraries alone that a target needs."""
        sides: list[tuple[str, ...]] = [(EMULATOR,)]
        if not target.emulator:
            sides = [(ANDROID, LINUX), (f"{_HEXAGON}{target.soc.dsp_arch}",)]
        libraries = {}
        for keys in sides:
            own = [key for key in keys if key in self.targets]
            if len(own) != 1:
                count = "no library" if not own else "two libraries"
                names = " or ".join(keys)
                reason = f"{self.name} has {count} for {names}, and {target} needs one"
                raise InvalidOptionError(f"{KEY}.targets", reason, ())
            libraries[own[0]] = self.targets[own[0]]
        return self.model_copy(update={"targets": libraries})

    def check(self) -> None:
        """Check that each library is for its target, and has the function that provides it."""
        for key, path in self.targets.items():
            try:
                library = read_elf(Path(path))
            except InputFileError as error:
                raise self._refused(key, f"{error.path} {error.reason}") from error
            machine, _, version = key.partition("-")
            hexagon = version if machine == "hexagon" else None
            if (library.machine, library.hexagon) != (machine, hexagon):
                raise self._refused(key, f"{path} is for {library}")
            if self.interface_provider not in library.exports:
                raise self._refused(key, f"{path} exports no {self.interface_provider}")

    def _refused(self, key: str, reason: str) -> InvalidOptionError:
        return InvalidOptionError(f"{KEY}.targets.{key}", reason, ())

    def files(self) -> Mapping[str, Path]:
        """Return the user's files, by the names that they have in a container."""
        return {_file_name(self.name, key): Path(path) for key, path in self.targets.items()}

    def in_container(self) -> "OpPackage":
        """Return the package as the manifest has it."""
        names = {key: _file_name(self.name, key) for key in sorted(self.targets)}
        return self.model_copy(update={"targets": names})

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """Libraries of a package in a container, the processor's before the Hexagon's."""
        sides = sorted((_side(key), file) for key, file in self.targets.items())
        return tuple(Registration(file, self.interface_provider, side) for side, file in sides)


def select_packages(packages: Iterable[OpPackage], target: Target) -> tuple[OpPackage, ...]:
    """Return packages with the libraries that a target needs, each of which is for it."""
    selection = tuple(package.for_target(target) for package in packages)
    names = [package.name for package in selection]
    for package in selection:
        if names.count(package.name) > 1:
            raise InvalidOptionError(KEY, f"{package.name} is there twice", ())
        package.check()
    return selection


def host_libraries(packages: Iterable[OpPackage]) -> "tuple[OpPackageLibrary, ...]":
    """Return the libraries for this host, with which graphs are compiled for any target."""
    from buildlib.toolchains.base import OpPackageLibrary

    libraries = []
    for package in packages:
        path = package.targets.get(EMULATOR)
        if path is None:
            reason = f"{package.name} has no library for {EMULATOR}, with which the compiler works"
            raise InvalidOptionError(f"{KEY}.targets", reason, ())
        package.model_copy(update={"targets": {EMULATOR: path}}).check()
        libraries.append(OpPackageLibrary(Path(path).absolute(), package.interface_provider))
    return tuple(libraries)


def added_operations(
    libraries: "Iterable[OpPackageLibrary]", toolchain: "Toolchain"
) -> tuple[str, ...]:
    """Return the operations that libraries for this host add to the compiler's."""
    return tuple(sorted(name for one in libraries for name in toolchain.op_package(one)))


def registrations(packages: Iterable[OpPackage]) -> tuple[Registration, ...]:
    """Return the libraries of a container's packages in the order in which QNN registers them."""
    return tuple(one for package in packages for one in package.registrations)


def _side(key: str) -> Side:
    return "HTP" if key.startswith(_HEXAGON) else "CPU"


def _file_name(name: str, key: str) -> str:
    return f"lib{name}_{_side(key)}.so"
