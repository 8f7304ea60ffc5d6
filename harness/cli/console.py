"""How commands speak: answers to stdout, progress and remarks to stderr."""

import json
import sys

import typer
from rich.console import Console
from rich.progress import Progress, ProgressColumn

_SHOWN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_SHOWN |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_UNBOUNDED = 100_000

EMULATOR = "measured on the HTP emulator: its speed says nothing about hardware speed"


def answers() -> Console:
    """The console of answers; when stdout is no terminal, plain text in lines of any length."""
    return _whole_lines(Console(highlight=False, soft_wrap=True))


def remarks() -> Console:
    """The console of progress and remarks, on stderr, so that answers can be piped."""
    return _whole_lines(Console(stderr=True, highlight=False))


def _whole_lines(console: Console) -> Console:
    """What is no terminal has no width, whatever `COLUMNS` says: its lines are for `grep`."""
    if not console.is_terminal:
        console.width = _UNBOUNDED
    return console


def tell(words: str) -> None:
    """One line on stderr, whatever it holds."""
    remarks().print(words, markup=False, soft_wrap=True)


def progress(*columns: ProgressColumn) -> Progress:
    """A bar on stderr that goes away when done; nothing where stderr is no terminal."""
    console = remarks()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def print_text(text: str) -> None:
    """Text that a model made up: as it is into a pipe, with control characters shown on a terminal.

    A terminal obeys control characters, and nobody knows what a model says.
    """
    if sys.stdout.isatty():
        text = text.translate(_SHOWN)
    typer.echo(text)


def print_json(value: object) -> None:
    """One JSON document on stdout, for programs."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))
