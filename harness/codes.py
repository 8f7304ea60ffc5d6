"""Error numbers of QNN, Genie and FastRPC, and exit statuses: their names, causes and fixes.

`codes.toml` is the table. An entry is named by its library, because numbers collide: Genie's 1 and
FastRPC's 1 differ. A `source` is a public address, or `reproduced` with how it was made to happen.
"""

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

Library = Literal["QNN", "Genie", "FastRPC", "exit"]
"""Who says a number; `exit` is the exit status of a process, 128 + n for signal n."""

_TABLE: Final = Path(__file__).with_name("codes.toml")
_LONGEST_LINE = 4096
_MOST_FINDINGS = 50
_LONGEST_GAP = 40
"""Characters between the beginnings of the parts of a message."""
_QNN = range(1000, 1 << 16)
_GENIE = range(-99, 0)
_EXIT = range(1, 256)
_DSP = range(0x8000_0000, 0x8001_0000)
_DSP_OFFSET = 0x400
_NUMBER = re.compile(r"-?[0-9]{1,10}|0[xX][0-9a-fA-F]{1,8}")
_NAME = re.compile(r"[A-Z][A-Z0-9_]{2,80}")
_FASTRPC_IN_LOG = re.compile(r"(?<![0-9A-Za-z])(?:0x8000[0-9a-fA-F]{4}|-21474[0-9]{5})\b")
_QNN_IN_LOG = re.compile(
    r"\b(?:failed to [^:\n]{1,80}:|(?:err|error|failed|code|status|symbols)\b)[^0-9A-Za-z\n-]{0,4}"
    r"(?:(?:code|with|err|error|number)[^0-9A-Za-z\n-]{1,4}){0,2}"
    r"(0x[0-9a-f]{3,4}|[0-9]{4,5})(?![-.:/]?[0-9a-z]|\s*(?:ms|us|bytes|[kmg]i?b)\b)",
    re.IGNORECASE,
)
_NAME_IN_LOG = re.compile(r"\b(?:QNN|GENIE|AEE)_[A-Z0-9_]{3,80}")
_EXIT_IN_LOG = re.compile(
    r"\b(?:ended with status|exit status|exit code) ([0-9]{1,3})\b"
    r"|\b(?:killed by|ended by|fatal) signal ([0-9]{1,2})\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of an error.

    Attributes:
        look_at: the evidence that tells this cause from the others.
        source: a public address, or `reproduced: ` and how.
    """

    cause: str
    look_at: str
    fix: str
    source: str


@dataclass(frozen=True, slots=True)
class Code:
    """One error number, or a message that comes without one.

    Attributes:
        number: unsigned for FastRPC; None for a message.
        name: the public constant, or the text of a message, with `*` for a word that differs; empty
            for a number without one.
        meaning: a few words; empty where no cause is known.
        source: of the name.
        harmless: no reason for a process to fail.
    """

    library: Library
    number: int | None
    name: str = ""
    meaning: str = ""
    source: str = ""
    causes: tuple[Cause, ...] = ()
    harmless: bool = False

    @property
    def known(self) -> bool:
        """True if the table has it, at least by name."""
        return bool(self.name)

    @property
    def label(self) -> str:
        """The number with its library, as in `QNN 5005`; the text of a message."""
        if self.number is None:
            return self.name
        library = "exit status" if self.library == "exit" else self.library
        return f"{library} {self._digits}"

    @property
    def argument(self) -> str:
        """The code as an argument of `qnnfarm explain`."""
        return f"{self.library.lower()}:{self._digits}"

    @property
    def _digits(self) -> str:
        return f"0x{self.number:08x}" if self.library == "FastRPC" else str(self.number)


@dataclass(frozen=True, slots=True)
class CodeFinding:
    """Code in a log.

    Attributes:
        line: where it stands first, counted from 1.
        text: of that line.
    """

    code: Code
    line: int
    text: str


@functools.cache
def load_codes() -> tuple[Code, ...]:
    """Read the table."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    names = {
        (block["library"], number): {"name": name, "source": block["source"]}
        for block in table["names"]
        for number, name in block["numbers"]
    }
    explained = {}
    for entry in table["code"]:
        key = (entry["library"], entry.get("number", entry.get("name")))
        causes = tuple(Cause(**cause) for cause in entry.pop("causes"))
        explained[key] = Code(**{"number": None, **names.get(key, {}), **entry}, causes=causes)
    others = {key: Code(*key, **about) for key, about in names.items() if key not in explained}
    return (*explained.values(), *others.values())


def parse_code(text: str) -> tuple[Code, ...]:
    """Return the codes that a text may mean: `5005`, `0x138d`, `genie:-6`, or a constant's name.

    A number that is not in the table is returned too, without a name. A text that is no code gives
    nothing.
    """
    library, _, rest = text.strip().rpartition(":")
    libraries = [name for name in get_args(Library) if name.lower() == library.lower()]
    if library and not libraries:
        return ()
    codes = [code for code in load_codes() if not libraries or code.library in libraries]
    if _NUMBER.fullmatch(rest):
        number = int(rest, 0) if rest[:2].lower() == "0x" else int(rest)
        number = _unsigned(number)
        if libraries == ["FastRPC"] and 0 < number < _DSP_OFFSET:  # as the CPU's side says it
            number += _DSP.start + _DSP_OFFSET
        matches = tuple(code for code in codes if code.number == number)
        library_ = libraries[0] if libraries else _library_of(number)
        return matches or (() if library_ is None else (Code(library_, number),))
    return tuple(code for code in codes if code.name == rest and _NAME.fullmatch(rest))


def find_codes(lines: Iterable[str]) -> list[CodeFinding]:
    """Return the codes in a log, each at its first line, in the order in which they appear.

    The first is the nearest to the cause: libraries pass errors on with numbers of their own. Lines
    are read up to 4096 characters, and at most 50 codes are returned.
    """
    findings: dict[tuple[Library, int | None, str], CodeFinding] = {}
    for number, line in enumerate(lines, 1):
        text = line[:_LONGEST_LINE]
        for code in _codes_of(text):
            key = (code.library, code.number, code.name)
            findings.setdefault(key, CodeFinding(code, number, text.strip()))
        if len(findings) >= _MOST_FINDINGS:
            break
    return list(findings.values())[:_MOST_FINDINGS]


def explain_end(log: str, exit_status: int | None) -> str:
    """Explain in a few words why a process failed: by the first known code, else by its status.

    Returns:
        E.g. ``QNN 5005: ... (`qnnfarm explain qnn:5005`)``; empty if nothing is known.
    """
    codes = [finding.code for finding in find_codes(log.splitlines())]
    codes += [_table().by_number.get(("exit", exit_status), Code("exit", exit_status))]
    code = next((code for code in codes if code.causes and not code.harmless), None)
    if code is None:
        return ""
    more = f" (`qnnfarm explain {code.argument}`)" if code.number is not None else ""
    return f"{code.label}: {code.meaning}{more}"


@dataclass(frozen=True, slots=True)
class _Table:
    by_number: Mapping[tuple[Library, int | None], Code]
    by_name: Mapping[str, Code]
    messages: tuple[tuple[Sequence[str], Code], ...]


@functools.cache
def _table() -> _Table:
    codes = load_codes()
    return _Table(
        {(code.library, code.number): code for code in codes if code.number is not None},
        {code.name: code for code in codes},
        tuple((code.name.casefold().split("*"), code) for code in codes if code.number is None),
    )


def _codes_of(line: str) -> Iterator[Code]:
    """Yield the codes of one line, from left to right within each kind."""
    table = _table()
    for match in _FASTRPC_IN_LOG.finditer(line):
        number = _unsigned(int(match[0], 0))
        if number in _DSP:
            yield table.by_number.get(("FastRPC", number), Code("FastRPC", number))
    for match in _QNN_IN_LOG.finditer(line):
        number = int(match[1], 0)
        if number in _QNN:
            yield table.by_number.get(("QNN", number), Code("QNN", number))
    names = _NAME_IN_LOG.findall(line)
    yield from (table.by_name[name] for name in names if name in table.by_name)
    for match in _EXIT_IN_LOG.finditer(line):
        number = int(match[1]) if match[1] else 128 + int(match[2])
        if ("exit", number) in table.by_number:
            yield table.by_number["exit", number]
    lower = line.casefold()
    for parts, code in table.messages:
        places = [lower.find(part) for part in parts]
        if min(places) >= 0 and 0 <= places[-1] - places[0] < _LONGEST_GAP:
            yield code


def _unsigned(number: int) -> int:
    """Return FastRPC's number for one that was printed as a signed integer."""
    return number + (1 << 32) if number + (1 << 32) in _DSP else number


def _library_of(number: int) -> Library | None:
    """Return the library of an unexplained number."""
    ranges: dict[Library, range] = {"FastRPC": _DSP, "Genie": _GENIE, "exit": _EXIT, "QNN": _QNN}
    return next((library for library, numbers in ranges.items() if number in numbers), None)
