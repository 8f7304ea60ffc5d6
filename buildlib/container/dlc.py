"""Description of a DLC (graph, operators, weights), read by the QNN system library."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError

from buildlib.errors import InputFileError, ToolchainError, ToolchainTimeoutError
from buildlib.toolchains.base import TensorInfo
from buildlib.toolchains.child_process import Step, run_step
from buildlib.toolchains.ort_qnn.wheel import find_libraries

_WORKER = "buildlib.container.dlc_worker"
_TIMEOUT_S = 300.0
Counts: TypeAlias = dict[str, int]


@dataclass(frozen=True, slots=True)
class DlcGraph:
    """The graph of a DLC.

    Attributes:
        operators: how many there are of each type, the most frequent first.
        weight_elements: how many numbers of each type its constants hold; those of `int4` take a
            byte each in a DLC, and half of one in a context binary.
    """

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    operators: Counts
    weight_elements: Counts


@dataclass(frozen=True, slots=True)
class DlcInfo:
    """Description of a DLC.

    Attributes:
        size_bytes: of the file.
        members: size in bytes of each part of the file; a DLC is a zip archive.
    """

    graphs: tuple[DlcGraph, ...]
    size_bytes: int
    members: Counts


def is_dlc(path: Path) -> bool:
    """Return whether a file is an archive with a model in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return "model" in archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def inspect_dlc(path: Path) -> DlcInfo:
    """Describe a DLC.

    Raises:
        ToolchainMissingError: there is no system library on this machine.
        InputFileError: it is missing, damaged, or no DLC at all.
        ToolchainTimeoutError: it cannot be read in time.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: member.file_size for member in archive.infolist()}
        size = path.stat().st_size
    except OSError as error:
        raise InputFileError(str(path), error.strerror or str(error)) from error
    except zipfile.BadZipFile as error:
        raise InputFileError(str(path), "it is no DLC") from error
    step = Step(_WORKER, "describe", path, _TIMEOUT_S, find_libraries().search_path)
    try:
        described = run_step(step, str(path.absolute()).encode())
        graphs = TypeAdapter(tuple[DlcGraph, ...]).validate_python(described)
    except ToolchainTimeoutError:
        raise
    except ToolchainError as error:
        Path(error.log_path).unlink(missing_ok=True)
        raise InputFileError(str(path), f"it is not a readable DLC ({error.reason})") from error
    except ValidationError as error:
        raise InputFileError(str(path), "its description makes no sense") from error
    return DlcInfo(graphs, size, members)
