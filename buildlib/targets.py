"""Targets of a build: the catalog of SoCs, and the two kinds of target of each SoC.

Data: `soc_model` and Hexagon architecture from the vendor's public device tables (AI Hub's
`llm_on_genie` tutorial, LiteRT's `supported_soc.csv`, the QNN automotive overview). VTCM sizes are
those that the QNN 2.51 compiler records in a binary for that `soc_model` when it is given no size;
where ExecuTorch's SoC table has the SoC too, it has the same size.

Memory bandwidth is the peak with the fastest memory that an SoC takes: two transfers a clock over
four channels of 16 bits. Clocks: LPDDR5 at 3200 MHz, 51.2 GB/s on the 8 Gen 1
(gadgetsinnepal.com.np), and the same on the 8+ (smartphones24.org); LPDDR5X at 4200 MHz on the 8
Gen 2 and 4800 MHz on the 8 Gen 3 (droidholic.com), 4200 MHz on the 8s Gen 3 (noticias3d.com), 5300
MHz, 84.8 GB/s on the 8 Elite (geektopia.es), 5300 MHz on the 8 Elite Gen 5 (lowyat.net). The X
Elite has eight channels and 136 GB/s (mashdigi.com).
"""

from dataclasses import dataclass

from buildlib.error_base import nearest_names
from buildlib.errors import BuildError

_EMULATOR_SUFFIX = "emulator"
_CHIPSET_PREFIX = "chipset"


@dataclass(frozen=True, slots=True)
class Soc:
    """One SoC with a Hexagon tensor processor.

    Attributes:
        name: the part number that Android reports as `ro.soc.model`, e.g. `SM8750`.
        soc_model: the number by which QNN knows the SoC.
        dsp_arch: the Hexagon architecture, e.g. `v79`.
        vtcm_mb: tightly coupled memory of the tensor processor in MiB.
        memory_gb_s: peak bandwidth of its memory in 10^9 bytes a second; None if no public source
            was found.
    """

    name: str
    marketing_name: str
    soc_model: int
    dsp_arch: str
    vtcm_mb: int
    memory_gb_s: float | None = None

    @property
    def htp_arch(self) -> int:
        """The Hexagon architecture as a number: 79 for `v79`."""
        return int(self.dsp_arch.removeprefix("v"))


@dataclass(frozen=True, slots=True)
class Target:
    """An SoC as hardware, or as the HTP emulator on x86_64 that stands in for it.

    `str(target)` is the form that `parse_target` reads: `SM8750` or `SM8750:emulator`.
    """

    soc: Soc
    emulator: bool = False

    @property
    def weight_sharing(self) -> bool:
        """True if graphs of one binary share weights: hardware does, the emulator cannot."""
        return not self.emulator

    def __str__(self) -> str:
        return f"{self.soc.name}:{_EMULATOR_SUFFIX}" if self.emulator else self.soc.name


_CATALOG = (
    Soc("SM8450", "Snapdragon 8 Gen 1", 36, "v69", 8, 51.2),
    Soc("SM8475", "Snapdragon 8+ Gen 1", 42, "v69", 8, 51.2),
    Soc("SM8550", "Snapdragon 8 Gen 2", 43, "v73", 8, 67.2),
    Soc("SM8635", "Snapdragon 8s Gen 3", 68, "v73", 4, 67.2),
    Soc("SM8650", "Snapdragon 8 Gen 3", 57, "v75", 8, 76.8),
    Soc("SM8750", "Snapdragon 8 Elite", 69, "v79", 8, 84.8),
    Soc("SM8850", "Snapdragon 8 Elite Gen 5", 87, "v81", 8, 84.8),
    Soc("SC8380XP", "Snapdragon X Elite", 60, "v73", 8, 136.0),
    Soc("SC8340XP", "Snapdragon X Plus 8-Core", 60, "v73", 8),
    Soc("QCM6490", "Qualcomm QCM6490", 35, "v68", 2),
    Soc("QCM6690", "Qualcomm QCM6690", 78, "v73", 2),
    Soc("QCS6690", "Qualcomm QCS6690", 78, "v73", 2),
    Soc("QCM8550", "Qualcomm QCM8550", 66, "v73", 8),
    Soc("QCS8275", "Qualcomm Dragonwing IQ-8275", 82, "v75", 8),
    Soc("QCS8300", "Qualcomm Dragonwing IQ8", 82, "v75", 8),
    Soc("QCS8625", "Qualcomm QCS8625", 90, "v75", 8),
    Soc("QCS9075", "Qualcomm Dragonwing IQ-9075", 77, "v73", 8),
    Soc("QCS9100", "Qualcomm Dragonwing IQ9", 77, "v73", 8),
    Soc("SA8255P", "Qualcomm SA8255P", 52, "v73", 8),
    Soc("SA8295P", "Qualcomm SA8295P", 39, "v68", 8),
    Soc("SXR2230P", "Snapdragon XR2 Gen 2", 53, "v69", 8),
    Soc("SXR2330P", "Qualcomm SXR2330P", 75, "v79", 8),
    Soc("SSG2115P", "Snapdragon AR2 Gen 1", 46, "v73", 2),
    Soc("SSG2125P", "Snapdragon AR2 Gen 1", 58, "v73", 2),
    Soc("SXR1230P", "Qualcomm SXR1230P", 45, "v73", 2),
)


def catalog() -> tuple[Soc, ...]:
    """Return every SoC that containers can be built for."""
    return _CATALOG


def find_soc(name: str) -> Soc:
    """Return the SoC of that part number, in upper or lower case."""
    soc = soc_named(name)
    if soc is None:
        forms = "write SM8750 for a phone or SM8750:emulator"
        raise BuildError(f"unknown SoC {name!r}: {forms}; {suggest_socs(name)}")
    return soc


def soc_named(name: str) -> Soc | None:
    """Return the SoC of that part number, in upper or lower case; `None` for an unknown one."""
    return next((soc for soc in _CATALOG if soc.name == name.strip().upper()), None)


def suggest_socs(name: str) -> str:
    """Return the part numbers to write in place of an unknown one: the nearest, and all."""
    names = [soc.name for soc in _CATALOG]
    near = nearest_names(name.strip(), names)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}known are {', '.join(names)}"


def parse_target(text: str) -> Target:
    """Read a target as the user writes it.

    `SM8750` and the Gen AI Builder's `chipset:SM8750` are the phone; `SM8750:emulator` is the
    emulator of that SoC.

    Raises:
        BuildError: no such SoC, or neither of these forms.
    """
    head, separator, rest = text.strip().partition(":")
    if separator and head.lower() == _CHIPSET_PREFIX:
        head, separator, rest = rest.partition(":")
    soc = find_soc(head)
    if separator and rest.strip().lower() != _EMULATOR_SUFFIX:
        forms = f"write {soc.name}:{_EMULATOR_SUFFIX} for its emulator, {soc.name} for a phone"
        raise BuildError(f"unknown target {text!r}: {forms}")
    return Target(soc, emulator=bool(separator))
