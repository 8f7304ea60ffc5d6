"""Options of how a dialog runs, as `generate` and `bench` share them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from harness.console import print_remark
from harness.errors import WrongUseError
from harness.runtimes.base import GenerationResult
from harness.runtimes.dialog_settings import parse_lora
from harness.runtimes.genie.speculation import describe

Temp = Annotated[
    float | None, typer.Option(help="Temperature of sampling. By default greedy: no sampling.")
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Sample among so many tokens; 1 is greedy.")
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", help="Sample among the tokens that have this probability together."),
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of sampling, by default 42; -1 for another text each time.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="A sequence that ends the answer, cut before it. Can be repeated."),
]
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
GenieConfigFile = Annotated[
    Path | None,
    typer.Option("--genie-config", help="Another genie_config.json for its files.", metavar="FILE"),
]


def dialog_fields(
    temp: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    stop: Sequence[str] | None,
    lora: str | None,
    genie_config: Path | None,
) -> dict[str, object]:
    """Return the options that were given, as fields of a workload.

    Raises:
        WrongUseError: `--lora` is no NAME=STRENGTH.
    """
    found = {
        "temp": temp,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
        "lora": None if lora is None else dict([parse_lora(lora)]),
        "genie_config": None if genie_config is None else str(genie_config.absolute()),
    }
    return {key: value for key, value in found.items() if value is not None}


def parse_tokens(text: str) -> tuple[int, ...]:
    """Read `--tokens`: ids, or a file of ids as `genie-t2t-run` takes it.

    Raises:
        WrongUseError: it is neither.
    """
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
        print_remark(describe(result.speculation))
