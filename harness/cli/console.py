"""How commands speak: answers to stdout, progress and remarks to stderr."""

import json

import typer
from rich.console import Console


def answers() -> Console:
    """The console of answers; plain text when stdout is no terminal."""
    return Console(highlight=False, soft_wrap=True)


def remarks() -> Console:
    """The console of progress and remarks, on stderr, so that answers can be piped."""
    return Console(stderr=True, highlight=False)


def print_json(value: object) -> None:
    """One JSON document on stdout, for programs."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))
