"""ELF files: the machine that one is for, its libraries, and its exports.

Sources: the generic System V ABI (https://gabi.xinuos.com) for headers, dynamic section and symbol
tables; LLVM's `BinaryFormat/ELF.h` (Apache-2.0 with LLVM exceptions) for Hexagon's flags; the NDK's
`crtbrand.S` (BSD-2-Clause, AOSP) for Android's note.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from buildlib.errors import InputFileError

_MAGIC = b"\x7fELF"
_MACHINES: Final = {3: "x86", 40: "arm", 62: "x86_64", 164: "hexagon", 183: "aarch64"}
_HEXAGON = 164
_HEXAGON_MACHINE = 0x3FF
_PROGRAM, _SHARED = 2, 3
_LOAD, _DYNAMIC, _NOTE = 1, 2, 4
_NEEDED, _HASH, _STRINGS, _SYMBOLS, _SONAME, _GNU_HASH = 1, 4, 5, 6, 14, 0x6FFFFEF5
_ANDROID = b"Android\0"
_ANDROID_API = 1
_MAX_NAME = 1024
_MAX_SYMBOLS = 1 << 20


@dataclass(frozen=True, slots=True)
class ElfInfo:
    """A shared library or a program.

    Attributes:
        machine: `x86_64`, `aarch64`, `hexagon`; the number of one that has no name here.
        hexagon: its Hexagon version, e.g. `v75`; None of other machines.
        android_api: API level that it was built for; None if it is not for Android.
        page_alignment: the smallest of its loaded segments, in bytes; a system with larger pages
            cannot load it.
        needed: libraries that it is linked to.
        exports: names of the functions and data that it defines for others; empty if they were not
            asked for.
    """

    machine: str
    hexagon: str | None
    android_api: int | None
    page_alignment: int
    soname: str | None
    needed: tuple[str, ...]
    exports: frozenset[str]

    def __str__(self) -> str:
        return f"{self.machine} {self.hexagon}" if self.hexagon else self.machine


def is_elf(path: Path) -> bool:
    """Return whether a file begins as an ELF file."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise InputFileError(str(path), error.strerror or str(error)) from error


def read_elf(path: Path, *, exports: bool = True) -> ElfInfo:
    """Read a library's or program's headers and dynamic symbols; its code is not looked at.

    Args:
        exports: whether to read the symbols, of which large libraries have thousands.

    Raises:
        InputFileError: it cannot be read, is no ELF library or program, or is damaged.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            return _Reader(data).info(exports=exports)
    except OSError as error:
        raise InputFileError(str(path), error.strerror or str(error)) from error
    except ValueError as error:  # also of mmap: an empty file
        raise InputFileError(str(path), f"is no ELF library or program: {error}") from error
    except (struct.error, OverflowError) as error:
        raise InputFileError(str(path), "is a damaged ELF file: it ends too early") from error


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: int
    offset: int
    address: int
    size: int
    alignment: int


class _Reader:
    """Reads one file; its offsets may lie anywhere: `struct` refuses those outside."""

    def __init__(self, data: mmap.mmap) -> None:
        if data[:4] != _MAGIC:
            raise ValueError("it does not begin as one")
        if data[4:6] not in (b"\1\1", b"\2\1"):
            raise ValueError("it is not little-endian of 32 or 64 bits")
        self._data = data
        self._wide = data[4:5] == b"\2"
        header = self._unpack("<HHIQQQIHHH" if self._wide else "<HHIIIIIHHH", 16)
        kind, self._machine, _, _, programs, _, self._flags, _, size, count = header
        if kind not in (_PROGRAM, _SHARED):
            raise ValueError("it is an object file or a memory dump")
        if size < (56 if self._wide else 32):
            raise ValueError(f"program headers of {size} bytes")
        self._segments = [self._segment(programs + i * size) for i in range(count)]
        self._tags = list(self._dynamic())

    def info(self, *, exports: bool) -> ElfInfo:
        hexagon = self._flags & _HEXAGON_MACHINE if self._machine == _HEXAGON else None
        sonames = self._names(_SONAME)
        return ElfInfo(
            machine=_MACHINES.get(self._machine, str(self._machine)),
            hexagon=None if hexagon is None else f"v{hexagon:x}",
            android_api=self._android_api(),
            page_alignment=min(
                (s.alignment for s in self._segments if s.kind == _LOAD and s.alignment > 1),
                default=0,
            ),
            soname=sonames[0] if sonames else None,
            needed=tuple(self._names(_NEEDED)),
            exports=frozenset(self._exports() if exports else ()),
        )

    def _unpack(self, form: str, offset: int) -> tuple[int, ...]:
        if offset < 0:
            raise ValueError("an address before its beginning")
        return struct.unpack_from(form, self._data, offset)

    def _segment(self, at: int) -> _Segment:
        if self._wide:
            kind, _, offset, address, _, size, _, alignment = self._unpack("<IIQQQQQQ", at)
        else:
            kind, offset, address, _, size, _, _, alignment = self._unpack("<IIIIIIII", at)
        return _Segment(kind, offset, address, size, alignment)

    def _of_kind(self, kind: int) -> Iterator[_Segment]:
        for segment in self._segments:
            if segment.kind == kind:
                if segment.offset + segment.size > len(self._data):
                    raise ValueError("a segment that ends behind its end")
                yield segment

    def _dynamic(self) -> Iterator[tuple[int, int]]:
        form = "<QQ" if self._wide else "<II"
        size = struct.calcsize(form)
        for segment in self._of_kind(_DYNAMIC):
            for number in range(segment.size // size):
                tag, value = self._unpack(form, segment.offset + number * size)
                if tag == 0:
                    return
                yield tag, value

    def _table(self, tag: int) -> int | None:
        """Return where in the file a table is that the dynamic section has by its address."""
        address = next((value for key, value in self._tags if key == tag), None)
        if address is None:
            return None
        for segment in self._of_kind(_LOAD):
            if segment.address <= address < segment.address + segment.size:
                return segment.offset + address - segment.address
        raise ValueError(f"a table at {address:#x}, outside its segments")

    def _text(self, offset: int) -> str:
        strings = self._table(_STRINGS)
        if strings is None:
            raise ValueError("names without a string table")
        text = self._data[strings + offset : strings + offset + _MAX_NAME]
        return text.partition(b"\0")[0].decode("utf-8", "replace")

    def _names(self, tag: int) -> list[str]:
        return [self._text(value) for key, value in self._tags if key == tag]

    def _exports(self) -> Iterator[str]:
        table = self._table(_SYMBOLS)
        if table is None:
            return
        size = 24 if self._wide else 16
        for number in range(self._symbol_count()):
            if self._wide:
                name, info, _, section, value, _ = self._unpack("<IBBHQQ", table + number * size)
            else:
                name, value, _, info, _, section = self._unpack("<IIIBBH", table + number * size)
            if section and value and info >> 4 in (1, 2):  # defined, and global or weak
                yield self._text(name)

    def _symbol_count(self) -> int:
        """Return the number of dynamic symbols, which only the hash tables tell."""
        if (plain := self._table(_HASH)) is not None:
            count = self._unpack("<II", plain)[1]
        elif (gnu := self._table(_GNU_HASH)) is not None:
            count = self._gnu_symbol_count(gnu)
        else:
            count = 0
        if count > _MAX_SYMBOLS:
            raise ValueError(f"{count} symbols")
        return count

    def _gnu_symbol_count(self, table: int) -> int:
        buckets, first, bloom, _ = self._unpack("<IIII", table)
        if buckets > _MAX_SYMBOLS:
            raise ValueError(f"{buckets} buckets of symbols")
        begin = table + 16 + bloom * (8 if self._wide else 4)
        last = max(self._unpack(f"<{buckets}I", begin), default=0)
        if last < first:
            return first
        chain = begin + 4 * buckets
        while not self._unpack("<I", chain + 4 * (last - first))[0] & 1:
            last += 1
        return last + 1

    def _android_api(self) -> int | None:
        for segment in self._of_kind(_NOTE):
            at, end = segment.offset, segment.offset + segment.size
            while at + 12 <= end:
                name_size, size, kind = self._unpack("<III", at)
                name = self._data[at + 12 : at + 12 + name_size]
                content = at + 12 + (name_size + 3) // 4 * 4
                if name == _ANDROID and kind == _ANDROID_API:
                    return self._unpack("<I", content)[0]
                at = content + (size + 3) // 4 * 4
        return None
