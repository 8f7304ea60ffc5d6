"""Options of how a dialog runs, as `generate` and `bench` share them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import absolute
from harness.console import print_remark
from harness.errors import WrongUseError
from harness.runtimes.base import GenerationResult

LoraAdapter = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="NAME=STRENGTH",
        help="Apply an adapter of the container; 0 is without it, 1 as it was trained.",
    ),
]
UseChat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Make prompts by the model's chat template; several prompts are the user's turns.",
    ),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system message of a --chat.")]


@dataclass(frozen=True)
class DialogOptions:
    """Settings of a dialog."""

    temp: Annotated[
        float | None, typer.Option(help="Temperature of sampling. By default greedy: no sampling.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Sample among so many tokens; 1 is greedy.")] = (
        None
    )
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample among the tokens that have this probability together."),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of sampling, by default 42; -1 for another text each time."),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A sequence that ends the answer, cut before it. Can be repeated."),
    ] = None
    lora: LoraAdapter = None
    genie_config: Annotated[
        Path | None,
        typer.Option(help="Another genie_config.json for its files.", metavar="FILE"),
    ] = None

    def fields(self) -> dict[str, object]:
        """Return the options that are there, as fields of a workload."""
        values: dict[str, object] = {
            **vars(self),
            "stop": tuple(self.stop) if self.stop else None,
            "lora": parse_lora(self.lora),
            "genie_config": absolute(self.genie_config),
        }
        return {key: value for key, value in values.items() if value is not None}


def parse_lora(text: str | None) -> dict[str, float] | None:
    """Read `NAME=STRENGTH`, or `NAME` for strength 1."""
    if text is None:
        return None
    name, equals, strength = text.partition("=")
    try:
        return {name: float(strength) if equals else 1.0}
    except ValueError:
        raise WrongUseError(f"--lora {text[:60]!r} is no NAME=STRENGTH, as in red=0.5") from None


def parse_tokens(text: str) -> tuple[int, ...]:
    """Read `--tokens`: ids, or a file of ids as `genie-t2t-run` takes it."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isdigit() for word in words):
        try:
            words = Path(text).read_text("ascii").split()
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise WrongUseError(
                f"--tokens {text[:60]!r} is neither token ids, as '42 79 260', nor a file of them"
            ) from error
    strange = next((word for word in words if not word.isdigit() or len(word) > 9), None)
    if strange is not None or not words:
        raise WrongUseError(f"--tokens: {(strange or text)[:20]!r} is not a token id")
    return tuple(int(word) for word in words)


def tell_faults(result: GenerationResult) -> None:
    """Print why an answer ended early, and that a dialog's texts differ from plain decoding's."""
    if result.early_end is not None:
        print_remark(str(result.early_end))
    if result.retries:
        print_remark(f"the program lost the end of its output: run {result.retries + 1} is shown")
    if result.speculation is not None and not result.speculation.agrees:
        print_remark(result.speculation.described)
