"""A table that fits a terminal: where there is no room, columns are left out and names wrapped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

ENDLESS = 10_000
"""Columns of what is no terminal."""
LEAST = 16
"""Columns that names get in any case."""
LONGEST_WORD = 36
"""Numbers make room for words of names up to that length; longer ones may be broken."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers.

    Attributes:
        cells: one for each row.
        rank: columns of the highest rank are left out first; those of rank 0 never are.
    """

    heading: str
    cells: Sequence[str]
    rank: int


@dataclass(frozen=True, slots=True)
class FittedTable:
    """Rows with names, and as many columns as there is room for.

    Attributes:
        names: of the rows; they are wrapped where they have to be, and numbers never.
    """

    heading: str
    names: Sequence[str]
    columns: Sequence[Column]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, with nothing after the last letter of a line."""
        width = options.max_width if console.is_terminal else ENDLESS
        wide = options.update(width=ENDLESS)
        longest = max(map(cell_len, self._words()), default=0)
        narrow = min(max(longest, LEAST), LONGEST_WORD)
        columns = list(self.columns)
        while _width(console, wide, self._table(columns, narrow)) > width:
            droppable = [column for column in columns if column.rank]
            if not droppable:
                break
            columns.remove(max(droppable, key=lambda column: column.rank))
        spare = width - _width(console, wide, self._table(columns, narrow))
        table = self._table(columns, max(narrow + spare, LEAST))
        for line in console.render_lines(table, wide, pad=False):
            yield from _unpadded(line)
            yield Segment.line()

    def _words(self) -> Iterable[str]:
        return (word for text in (self.heading, *self.names) for word in text.split())

    def _table(self, columns: Sequence[Column], most: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        table.add_column(self.heading, overflow="fold", max_width=most)
        for column in columns:
            table.add_column(column.heading, justify="right", no_wrap=True)
        for name, *cells in zip(self.names, *(column.cells for column in columns), strict=True):
            table.add_row(*map(Text, (name, *cells)))
        return table


def _width(console: Console, options: ConsoleOptions, table: Table) -> int:
    return Measurement.get(console, options, table).maximum


def _unpadded(line: Sequence[Segment]) -> list[Segment]:
    kept = list(line)
    while kept and not kept[-1].text.strip():
        kept.pop()
    if kept:
        text, style, control = kept[-1]
        kept[-1] = Segment(text.rstrip(), style, control)
    return kept
