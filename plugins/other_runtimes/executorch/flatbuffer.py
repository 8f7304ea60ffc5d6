"""Reader of FlatBuffers whose offsets are not trusted.

Source: https://flatbuffers.dev/internals (Apache-2.0). Fields are named by their number in the
schema, from 0; a union has two, its type and its value.
"""

import struct
from mmap import mmap
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

Buffer = bytes | mmap
_MOST = 1 << 16
"""Entries of a vector of tables."""
_LONGEST_TEXT = 1000


def read_at(layout: str, data: Buffer, position: int) -> int:
    """Read a number; as the methods below, raise ValueError where it does not lie in the data."""
    if not 0 <= position <= len(data) - struct.calcsize(layout):
        raise ValueError(f"an offset points to {position}, out of its {len(data)} bytes")
    number: int = struct.unpack_from(layout, data, position)[0]
    return number


class Table:
    """A table at a position.

    All methods raise ValueError where the data contradicts itself.
    """

    def __init__(self, data: Buffer, position: int) -> None:
        self._data = data
        self._position = position
        self._vtable = position - read_at("<i", data, position)
        self._size = read_at("<H", data, self._vtable)

    @classmethod
    def root(cls, data: Buffer) -> Self:
        """Return the root table of a buffer."""
        return cls(data, read_at("<I", data, 0))

    def number(self, field: int, layout: str) -> int:
        """Return a number by its `struct` layout, 0 by default."""
        place = self._place(field)
        return 0 if place is None else read_at(layout, self._data, place)

    def table(self, field: int) -> "Table":
        """Return a table."""
        place = self._place(field)
        if place is None:
            raise ValueError(f"a table lacks its field {field}")
        return Table(self._data, self._follow(place))

    def text(self, field: int) -> str:
        """Return a text, empty by default."""
        start, size = self.span(field, 1)
        if size > _LONGEST_TEXT:
            raise ValueError(f"a text has {size} bytes")
        return self._data[start : start + size].decode(errors="replace")

    def tables(self, field: int) -> "Iterator[Table]":
        """Yield the tables of a vector."""
        start, count = self.span(field, 4)
        if count > _MOST:
            raise ValueError(f"a vector has {count} entries")
        for place in range(start, start + 4 * count, 4):
            yield Table(self._data, self._follow(place))

    def span(self, field: int, item_bytes: int) -> tuple[int, int]:
        """Return the place of the items of a vector and their number; nowhere by default."""
        place = self._place(field)
        if place is None:
            return 0, 0
        vector = self._follow(place)
        count = read_at("<I", self._data, vector)
        if count * item_bytes > len(self._data) - vector - 4:
            raise ValueError(f"a vector of {count} items ends after its {len(self._data)} bytes")
        return vector + 4, count

    def _place(self, field: int) -> int | None:
        slot = 4 + 2 * field
        offset = read_at("<H", self._data, self._vtable + slot) if slot < self._size else 0
        return self._position + offset if offset else None

    def _follow(self, place: int) -> int:
        return place + read_at("<I", self._data, place)
