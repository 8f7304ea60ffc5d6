"""Tables that are never cut or folded: whole lines in a pipe, what has no room beneath its row."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from harness.cli.console import answers

_GAP = 2
_INDENT = 2


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Attributes:
        cells: one for each heading, on one line each.
        below: lines of their own beneath the row, whatever the width.
    """

    cells: Sequence[Text | str]
    below: Sequence[Text | str] = ()


def print_rows(
    headings: Sequence[str],
    rows: Sequence[Row],
    *,
    right: Collection[str] = (),
    console: Console | None = None,
) -> None:
    """Print a table.

    Columns stand in the order of their importance. On a terminal that is too narrow for all, the
    last of them stand beneath each row instead, with their headings; the very last, which takes
    texts of any length, without.

    Args:
        right: headings of numbers, which are aligned to the right.
        console: by default that of answers.
    """
    console = console or answers()
    lines = [[_text(cell) for cell in row.cells] for row in rows]
    widths = [
        max(Text(heading).cell_len, *(line[number].cell_len for line in lines), 0)
        for number, heading in enumerate(headings)
    ]
    beside = _fitting(widths, console.width) if console.is_terminal else len(widths)
    pads = [
        width if heading in right else -width
        for width, heading in zip(widths, headings, strict=True)
    ]
    console.print(_line([Text(heading, "bold") for heading in headings], pads, beside))
    for row, line in zip(rows, lines, strict=True):
        console.print(_line(line, pads, beside))
        beneath = _beneath(headings, line, beside)
        for text in (*([beneath] if beneath else []), *map(_text, row.below)):
            console.print(Text(" " * _INDENT).append_text(text))


def _fitting(widths: Sequence[int], room: int) -> int:
    """How many columns there is room for, at least the first."""
    taken, count = -_GAP, 0
    for width in widths:
        taken += _GAP + width
        if taken > room:
            break
        count += 1
    return max(1, count)


def _line(cells: Sequence[Text], pads: Sequence[int], beside: int) -> Text:
    """Cells of their columns' widths, which are negative where the text is on the left."""
    line = Text()
    for number, (cell, pad) in enumerate(zip(cells[:beside], pads, strict=False)):
        spaces = " " * (abs(pad) - cell.cell_len)
        gap = " " * _GAP if number else ""
        line.append(gap + (spaces if pad > 0 else "")).append_text(cell)
        line.append("" if pad > 0 else spaces)
    line.rstrip()
    return line


def _beneath(headings: Sequence[str], cells: Sequence[Text], beside: int) -> Text | None:
    """What has no room beside the row."""
    last = len(headings) - 1
    told = [
        cell.copy() if number == last else Text(f"{headings[number]} ").append_text(cell)
        for number, cell in enumerate(cells)
        if number >= beside and cell
    ]
    return Text(", ").join(told) if told else None


def _text(cell: Text | str) -> Text:
    return Text(" ".join(cell.splitlines())) if isinstance(cell, str) else cell
