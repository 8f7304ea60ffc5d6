"""Output for people: consoles, control characters made visible, and tables.

Names, messages and outputs come from containers, devices and databases that others made. Our
consoles obey nothing in them: markup is text, and control characters are shown.

Answers go to stdout, progress and remarks to stderr. Pipes and files get plain text in lines of any
length. Tables are never cut: columns that do not fit stand beneath their row, or are left
out by rank; numbers are never wrapped.
"""

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.segment import Segment
from rich.text import Text

from harness.words import emulator_notice

_CONTROLS = (*range(0x2028, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | {code: f"[U+{code:04X}]" for code in (*range(0x80, 0xA0), *_CONTROLS)}
    | dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}")
)
_ESCAPED = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *_CONTROLS)}
"""Characters that JSON does not escape by itself; they stand in strings only."""
_UNBOUNDED = 100_000
_GAP = 2
_INDENT = 2
_NARROWEST_NAME = 16
"""Columns that names get in any case."""
_LONGEST_WORD = 36
"""Numbers make space for words of names up to this length; longer ones may be broken."""

EMULATOR = emulator_notice()


class PlainConsole(Console):
    """Console that shows control characters and markup instead of obeying them.

    Away from a terminal it ignores `COLUMNS`: lines in a pipe are for `grep`.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - those of rich's consoles
        super().__init__(**options, highlight=False, markup=False, emoji=False)
        if not self.is_terminal:
            self.width = _UNBOUNDED

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401 - rich's own
        """Make a text to render, with control characters shown."""
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render with control characters shown, but for those of the console's own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def answers() -> Console:
    """Create the console of answers, on stdout; a pipe gets plain text in lines of any length."""
    return PlainConsole(soft_wrap=True)


def remarks() -> Console:
    """Create the console of progress and remarks, on stderr, so that answers can be piped."""
    return PlainConsole(stderr=True)


def print_remark(words: str) -> None:
    """Print one line on stderr."""
    remarks().print(_one_line(words), soft_wrap=True)


def progress(*columns: ProgressColumn) -> Progress:
    """Create a progress bar on stderr that disappears when done; disabled without a terminal."""
    console = remarks()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def visible(text: str) -> str:
    """Show control characters instead of obeying them.

    Among them are the bidirectional controls, by which a text could reorder the text around it.
    """
    return text.translate(_VISIBLE)


def print_text(text: str) -> None:
    """Print generated text: unchanged into a pipe, with visible control characters on a terminal.

    A terminal obeys control characters, and a model may generate any.
    """
    if sys.stdout.isatty():
        text = visible(text)
    typer.echo(text)


def print_json(value: object) -> None:
    """Print a JSON document on stdout, with all control characters escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    typer.echo(text.translate(_ESCAPED))


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
    rows: Sequence[Row | Sequence[Text | str]],
    *,
    right: Collection[str] = (),
    console: Console | None = None,
) -> None:
    """Print a table whose columns stand in the order of their importance.

    On a terminal that is too narrow for all, the last of them stand beneath each row instead, with
    their headings; the very last, which takes texts of any length, without.

    Args:
        rows: their cells, or a `Row` where lines stand beneath it.
        right: headings of numbers, which are aligned to the right.
        console: by default that of answers.
    """
    console = console or answers()
    whole = [row if isinstance(row, Row) else Row(row) for row in rows]
    lines = [[_one_line(cell) for cell in row.cells] for row in whole]
    widths = [
        max(Text(heading).cell_len, *(line[number].cell_len for line in lines), 0)
        for number, heading in enumerate(headings)
    ]
    beside = len(widths)
    while console.is_terminal and beside > 1 and _total(widths[:beside]) > console.width:
        beside -= 1
    pads = [
        width if heading in right else -width
        for width, heading in zip(widths[:beside], headings, strict=False)
    ]
    console.print(_line([Text(heading, "bold") for heading in headings], pads))
    for row, line in zip(whole, lines, strict=True):
        console.print(_line(line, pads))
        beneath = _beneath(headings, line, beside)
        for text in (*([beneath] if beneath else []), *map(_one_line, row.below)):
            console.print(Text(" " * _INDENT).append_text(text))


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of numbers; heading and cells may have several lines.

    Attributes:
        cells: one for each row.
        rank: columns of the highest rank are left out first; those of rank 0 never are.
    """

    heading: str
    cells: Sequence[str]
    rank: int


def print_numbers(
    heading: str, names: Sequence[str], columns: Sequence[NumberColumn], *, console: Console
) -> None:
    """Print named rows of numbers, with as many columns as fit the terminal.

    Args:
        heading: of the names.
        names: of the rows; they are wrapped where they have to be, and numbers never.
    """
    names = [visible(name) for name in names]
    words = [word for text in (heading, *names) for word in text.split()]
    longest = max(Text(word).cell_len for word in words)
    narrow = min(max(longest, _NARROWEST_NAME), _LONGEST_WORD)
    widths = {column.heading: _width([column.heading, *column.cells]) for column in columns}
    shown_columns = list(columns)
    limit = console.width if console.is_terminal else _UNBOUNDED
    while _total([narrow, *(widths[column.heading] for column in shown_columns)]) > limit:
        optional = [column for column in shown_columns if column.rank]
        if not optional:
            break
        shown_columns.remove(max(optional, key=lambda column: column.rank))
    spare = limit - _total([narrow, *(widths[column.heading] for column in shown_columns)])
    name_width = min(max(narrow + spare, _NARROWEST_NAME), _width([heading, *names]))
    pads = [-name_width, *(widths[column.heading] for column in shown_columns)]

    def wrapped(text: str, style: str = "") -> list[Text]:
        return list(Text(text, style).wrap(console, name_width, overflow="fold"))

    def print_block(name: list[Text], cells: Iterable[str], style: str = "") -> None:
        columns = [[Text(line, style) for line in cell.split("\n")] for cell in cells]
        for line in zip_longest(name, *columns, fillvalue=Text()):
            console.print(_line(line, pads), crop=False, no_wrap=True, overflow="ignore")

    print_block(wrapped(heading, "bold"), (column.heading for column in shown_columns), "bold")
    for number, name in enumerate(names):
        print_block(wrapped(name), (column.cells[number] for column in shown_columns))


def _width(texts: Iterable[str]) -> int:
    return max(Text(line).cell_len for text in texts for line in text.split("\n"))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _line(cells: Sequence[Text], pads: Sequence[int]) -> Text:
    """Return cells of their columns' widths, which are negative where the text is on the left."""
    line = Text()
    for number, (cell, pad) in enumerate(zip(cells, pads, strict=False)):
        spaces = " " * (abs(pad) - cell.cell_len)
        gap = " " * _GAP if number else ""
        line.append(gap + (spaces if pad > 0 else "")).append_text(cell)
        line.append("" if pad > 0 else spaces)
    line.rstrip()
    return line


def _beneath(headings: Sequence[str], cells: Sequence[Text], beside: int) -> Text | None:
    """Return the cells that do not fit beside the others."""
    last = len(headings) - 1
    texts = [
        cell.copy() if number == last else Text(f"{headings[number]} ").append_text(cell)
        for number, cell in enumerate(cells)
        if number >= beside and cell
    ]
    return Text(", ").join(texts) if texts else None


def _one_line(cell: Text | str) -> Text:
    """Return a cell without control characters, which would have no width."""
    return Text(visible(" ".join(cell.splitlines()))) if isinstance(cell, str) else cell
