"""Genie and QNN for one kind of device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from buildlib.targets import Soc

_COMMON = (
    "libGenie.so", "libQnnHtp.so", "libQnnSystem.so", "libQnnHtpNetRunExtensions.so",
    "libQnnHtpPrepare.so",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenieLibraries:
    """Files that run a container from one folder.

    Attributes:
        origin: where they come from, with its version: `onnxruntime-qnn 2.7.0`.
        files: libraries, by the names that they need in that folder.
        programs: the SDK's own runners, by their names; none where the device has Python, which
            runs ours.
    """

    origin: str
    files: Mapping[str, Path]
    programs: Mapping[str, Path] = field(default_factory=dict)


def needed_libraries(soc: Soc) -> tuple[str, ...]:
    """Return the libraries that a container needs, as in the vendor's tutorial for Android.

    >>> from buildlib.targets import find_soc
    >>> needed_libraries(find_soc("SM8750"))[-2:]
    ('libQnnHtpV79Stub.so', 'libQnnHtpV79Skel.so')
    """
    arch = soc.htp_arch
    return (*_COMMON, f"libQnnHtpV{arch}Stub.so", f"libQnnHtpV{arch}Skel.so")


def profiling_readers(soc: Soc) -> tuple[str, ...]:
    """Return the libraries that read QNN's profiles on a device, which not every source has."""
    readers = ("libQnnHtpProfilingReader.so", "libQnnHtpOptraceProfilingReader.so")
    return (*readers, f"libQnnHtpV{soc.htp_arch}CalculatorStub.so")
