"""Phrases in texts for people, and cells in their tables."""

import contextlib

NO_VALUE = "\N{EN DASH}"
"""Sign in tables where there is no value."""


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


def soc_label(soc: str, *, emulator: bool) -> str:
    """Name a SoC: `SM8750`, `SM8750 emulator`, `emulator`; empty if nothing is known."""
    return " ".join(filter(None, (soc, "emulator" if emulator else "")))
