"""Genie and QNN for one kind of device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from buildlib.targets import Soc

_RUNTIME = (
    "libGenie.so", "libQnnHtp.so", "libQnnSystem.so", "libQnnHtpNetRunExtensions.so",
    "libQnnHtpPrepare.so",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenieLibraries:
    """Files that run a Genie dialog from one folder.

    Attributes:
        origin: where they come from, with its version: `onnxruntime-qnn 2.7.0`.
        files: libraries, by the names that they need in that folder.
        programs: the SDK's own runners, by their names; none where the device has Python, which
            runs ours.
    """

    origin: str
    files: Mapping[str, Path]
    programs: Mapping[str, Path] = field(default_factory=dict)


def cpu_libraries(soc: Soc) -> tuple[str, ...]:
    """Return the CPU's libraries, as in the vendor's tutorial for Genie on Android."""
    return (*_RUNTIME, f"libQnnHtpV{soc.htp_arch}Stub.so")


def hexagon_library(soc: Soc) -> str:
    """Return the libraries that its tensor processor loads.

    >>> from buildlib.targets import find_soc
    >>> hexagon_library(find_soc("SM8750"))
    'libQnnHtpV79Skel.so'
    """
    return f"libQnnHtpV{soc.htp_arch}Skel.so"
