"""Phrases in texts for people, and cells in their tables."""

import contextlib
from collections.abc import Iterable
from typing import Final

NO_VALUE = "\N{EN DASH}"
"""Sign in tables where there is no value."""

HOST_CPU: Final = "host CPU"
_WITHOUT_NPU = frozenset(("llama.cpp", "geniex-bench"))
"""Runtimes that a virtual device, an x86 machine, runs on its CPU; others run graphs of an NPU."""


def pluralize(number: int, noun: str) -> str:
    """Put a number before its noun: `1 run`, `2 runs`, `1,500 entries`."""
    if number == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {plural}"


def percent(part: float, *, signed: bool = True) -> str:
    """Format a part as every command and report does: `-9.5%`, and `+0.82%` below 1 %."""
    return f"{part:{'+' if signed else ''}.{1 if abs(part) >= 0.01 else 2}%}"


def csv_cell(value: object) -> object:
    """Return a value for a cell of a CSV file that spreadsheets do not take for a formula.

    Text that begins as formulas do, and is no number, gets an apostrophe before it (OWASP, "CSV
    Injection").
    """
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


def stand_in(runtime: str) -> str:
    """Name what computes on a virtual device in place of a phone's NPU, by a runtime."""
    return HOST_CPU if runtime in _WITHOUT_NPU else "emulator"


def soc_label(soc: str, *, emulator: bool, runtime: str = "") -> str:
    """Name a SoC: `SM8750`, `SM8750 emulator`, `emulator`; empty if nothing is known."""
    if emulator and stand_in(runtime) == HOST_CPU:
        return f"{HOST_CPU} of a virtual {soc or 'device'}"
    return " ".join(filter(None, (soc, "emulator" if emulator else "")))


def emulator_notice(runtimes: Iterable[str] = ()) -> str:
    """Say where runs on virtual devices were measured, and what their speed is worth."""
    kinds = {stand_in(one) for one in runtimes}
    where = " or ".join(
        (
            *(() if kinds == {HOST_CPU} else ("on the HTP emulator",)),
            *(("on the host's CPU",) if HOST_CPU in kinds else ()),
        )
    )
    return f"measured {where}: its speed says nothing about hardware speed"
