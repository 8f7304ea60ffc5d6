"""Tests of `qnnfarm bench`, by llama-bench's options `-p`, `-n`, `-pg` and `-d`.

One run of ours measures a prompt and the generation after it, so `-p 64 -n 16` is one test here
(`pp64` and `tg16 @ d64` at once), and lists of both give every pair. Genie always takes a prompt
and gives the first token with it; so the nearest to `-n 0` is a prompt with that token alone,
without a decode rate, and the nearest to `-p 0` a generation after the shortest prompt.

With `-d`, prompts and generations are tests of their own, as in llama-bench: a prompt after a query
that fills the context, and a generation after a prompt of the depth.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from harness.errors import WrongUseError
from harness.results.identity import SHORTEST_PROMPT

_PROMPT, _GENERATED = 64, 16
_FIRST_TOKEN = 1
_MOST_TESTS = 1000


@dataclass(frozen=True, slots=True)
class BenchTest:
    """A test as it is run.

    Attributes:
        together: whether the speed of prompt and generation together is asked for.
        depth: tokens in the context before the prompt.
    """

    prompt_tokens: int
    new_tokens: int
    together: bool = False
    depth: int = 0


@dataclass(frozen=True)
class LlamaBenchOptions:
    """llama-bench's options of tests."""

    prompt_tokens: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--prompt-tokens",
            metavar="N[,N...]",
            help="Tokens to prefill, bos included; 0 for the shortest prompt, without its speed. "
            "By default 64.",
        ),
    ] = None
    new_tokens: Annotated[
        list[str] | None,
        typer.Option(
            "-n",
            "--new-tokens",
            metavar="N[,N...]",
            help="Tokens to generate; 0 for just the one that Genie gives with the prompt. By "
            "default 16.",
        ),
    ] = None
    both: Annotated[
        list[str] | None,
        typer.Option(
            "-pg",
            metavar="P,N",
            help="A prompt of P tokens with N generated ones, and the speed of both together; may "
            "be repeated.",
        ),
    ] = None
    depth_tokens: Annotated[
        list[str] | None,
        typer.Option(
            "-d",
            "--depth",
            metavar="N[,N...]",
            help="Tokens in the context before a prompt of `-p`, and before those that are "
            "generated: `pp128 @ d64`, `tg16 @ d64`.",
        ),
    ] = None

    def tests(self) -> tuple[BenchTest, ...]:
        """Return the tests, each once."""
        prompts, both = self.prompt_tokens, self.both
        at_depth = _numbers("-d", self.depth_tokens) or (0,)
        pairs = [_test(*_pair(text)) for text in both or ()]
        tests = [replace(test, together=True, depth=depth) for depth in at_depth for test in pairs]
        lengths, counts = _numbers("-p", prompts), _numbers("-n", self.new_tokens) or (_GENERATED,)
        for depth in at_depth:
            if depth and any(lengths):  # as llama-bench: each is a test of its own there
                tests += [replace(_test(prompt, 0), depth=depth) for prompt in lengths if prompt]
                tests += [_test(depth, count) for count in counts if count]
            elif self.depth_tokens is not None and not any(lengths):
                tests += [_test(depth, count) for count in counts if count]
            else:
                default = () if both and self.new_tokens is None else (_PROMPT,)
                tests += [_test(p, n) for p in lengths or default for n in counts if p or n]
        if not tests:
            raise WrongUseError(
                f"-d {max(at_depth)} -n 0 measures nothing: a depth is that of -p or -n"
                if any(at_depth)
                else "-p 0 -n 0 measures nothing: give one of them"
            )
        unique: dict[tuple[int, int, int], BenchTest] = {}
        for test in tests:  # those of -pg come first
            unique.setdefault((test.prompt_tokens, test.new_tokens, test.depth), test)
        if len(unique) > _MOST_TESTS:
            raise WrongUseError(f"{len(unique):,} tests are too many: at most {_MOST_TESTS:,}")
        return tuple(unique.values())


def _test(prompt: int, generated: int) -> BenchTest:
    return BenchTest(prompt or SHORTEST_PROMPT, generated or _FIRST_TOKEN)


def _numbers(option: str, texts: Sequence[str] | None) -> tuple[int, ...]:
    words = [word for text in texts or () for word in text.split(",")]
    strange = next((word for word in words if not re.fullmatch(r"[0-9]{1,7}", word.strip())), None)
    if strange is not None:
        raise WrongUseError(
            f"{option}: {strange[:20]!r} is not a number of tokens such as 64, or 64,128"
        )
    return tuple(dict.fromkeys(map(int, words)))


def _pair(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*([1-9][0-9]{0,6})\s*,\s*([1-9][0-9]{0,6})\s*", text)
    if match is None:
        raise WrongUseError(f"-pg: {text[:20]!r} is no pair of prompt and generation: as in 64,16")
    return int(match[1]), int(match[2])
