"""Parameters of the suites: `--suite-param NAME=VALUE`, else values that fit the container."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from harness.errors import WrongUseError
from harness.pytest_plugin.options import read_settings
from harness.results.perplexity import PerplexityBound

_MOST = 1_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Default lengths of the throughput tests, as far as they fit.

    Attributes:
        pp: prompts, bos included.
        tg: tokens generated.
        depth: tokens before those.
    """

    pp: tuple[int, ...]
    tg: tuple[int, ...]
    depth: tuple[int, ...]


HARDWARE_LENGTHS = Lengths((128, 512, 1024, 2048, 4096), (32, 128), (64, 512, 2048))
"""As in llama-bench."""
EMULATOR_LENGTHS = Lengths((128,), (8,), (64,))
"""Short: the emulator decodes a few tokens a second, and its speed says nothing about hardware."""


@dataclass(frozen=True, slots=True)
class SuiteParameters:
    """Parameters of all suites; None where the container decides.

    Attributes:
        pp: prompt lengths of throughput, bos included.
        tg: numbers of tokens that throughput generates.
        depth: tokens in the context before throughput generates.
        repetitions: measured ones of each throughput test.
        warmup: repetitions before them; None: until they are steady.
        text: file that perplexity is taken over.
        windows: at most so many windows of it.
        checkpoint: folder of the model that the container was built from; perplexity is compared
            with that model's, in float on this host.
        max_perplexity: bound of the perplexity; by default what the bits of the container allow.
        max_kl: bound in nats of the divergence of decode steps from float; by default what the
            bits of the container allow.
        min_cosine: of each embedding of a text encoder with the same model in float.
        task: file of questions or prompts.
        rows: at most so many of it.
        turns: the most turns of a conversation.
        soak_s: how long soak goes on.
        soak_dialogs: dialogs that one process of soak holds.
        max_memory_growth: part by which a process may grow in soak.
        max_slowdown: part by which the speed may fall in soak.
        plain: folder of a container of the same model that does not speculate.
        speculation_prompts: that both containers answer.
    """

    pp: tuple[int, ...] | None = None
    tg: tuple[int, ...] | None = None
    depth: tuple[int, ...] | None = None
    repetitions: int = 5
    warmup: int | None = None
    text: Path | None = None
    windows: int = 8
    checkpoint: Path | None = None
    max_perplexity: PerplexityBound | None = None
    max_kl: float | None = None
    min_cosine: float = 0.98
    task: Path | None = None
    rows: int = 12
    turns: int = 4
    soak_s: float = 60.0
    soak_dialogs: int = 8
    max_memory_growth: float = 0.1
    max_slowdown: float = 0.25
    plain: Path | None = None
    speculation_prompts: int = 20

    @classmethod
    def read(cls, texts: Mapping[str, str]) -> "SuiteParameters":
        """Parse the user's texts.

        Raises:
            pytest.UsageError: a name that no suite knows, or a value that it cannot have.
        """
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in texts.items():
            if name not in known:
                names = ", ".join(sorted(known))
                raise pytest.UsageError(f"--suite-param: no suite knows {name!r}: {names}")
            try:
                values[name] = _READERS.get(name, _whole)(text)
            except ValueError as error:
                raise pytest.UsageError(f"--suite-param: {name}={text!r}: {error}") from error
        return cls(**values)


def parameters(config: pytest.Config) -> SuiteParameters:
    """Read the parameters of this run of pytest."""
    return SuiteParameters.read(read_settings(config).params)


def choose_lengths(
    requested: tuple[int, ...] | None, default: tuple[int, ...], limit: int
) -> tuple[int, ...]:
    """Choose the lengths to test: the requested ones, else the default ones up to `limit`.

    If none of those fits, the largest power of two that does.
    """
    if requested is not None:
        return requested
    lengths = tuple(length for length in default if length <= limit)
    return lengths or (1 << max(limit.bit_length() - 1, 0),)


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(_MOST))):
        raise ValueError("it is a whole number")
    return int(text)


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise ValueError("it is at least 1")
    return number


def _several(text: str) -> int:
    number = _whole(text)
    if number < 2:
        raise ValueError("it is at least 2")
    return number


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(_positive(word) for word in text.split(","))


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number <= _MOST:
        raise ValueError(f"it is from 0 to {_MOST}")
    return number


def _cosine(text: str) -> float:
    number = float(text)
    if not -1 <= number <= 1:
        raise ValueError("it is from -1 to 1")
    return number


def _bound(text: str) -> PerplexityBound:
    try:
        return PerplexityBound.parse(text)
    except WrongUseError as error:
        raise ValueError(str(error)) from error


def _path(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise ValueError("it does not exist")
    return path


_READERS: Mapping[str, Callable[[str], object]] = {
    "pp": _lengths,
    "tg": _lengths,
    "depth": _lengths,
    "repetitions": _positive,
    "text": _path,
    "windows": _positive,
    "checkpoint": _path,
    "max_perplexity": _bound,
    "max_kl": _number,
    "min_cosine": _cosine,
    "task": _path,
    "rows": _positive,
    "turns": _several,
    "soak_s": _number,
    "soak_dialogs": _positive,
    "max_memory_growth": _number,
    "max_slowdown": _number,
    "plain": _path,
    "speculation_prompts": _positive,
}
