"""Rows of CSV that a tool wrote, among other lines that it printed meanwhile."""

import csv

from harness.importing.records import Entries, UnreadableError


def read_rows(text: str, first: str) -> Entries:
    """Read the rows under a header that begins with a name."""
    names: list[str] = []
    for line, row in enumerate(text.split("\n"), 1):
        try:
            fields = next(csv.reader([row.strip("\r")]), [])
        except csv.Error as error:
            if names:
                yield UnreadableError(line, f"it is no CSV: {error}")
            continue
        if fields[:1] == [first]:
            names = fields
        elif names and len(fields) == len(names):
            yield line, dict(zip(names, fields, strict=True))
        elif len(fields) > len(names) // 2 > 0:
            yield UnreadableError(line, f"it has {len(fields)} values for {len(names)} names")
