"""Benchmark prompts, cut from the opening of Genesis (King James, public domain)."""

from dataclasses import dataclass
from pathlib import Path

from harness.errors import WrongUseError
from harness.runtimes.tokenizer import encode, load_tokenizer


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt of a fixed length.

    Attributes:
        token_ids: of the query to the device.
        text: the same for people to read.
    """

    token_ids: tuple[int, ...]
    text: str


def bench_text() -> str:
    """Read the whole text, about 10,000 characters."""
    return (Path(__file__).parent / "bench_prompt.txt").read_text(encoding="utf-8")


def cut_prompt(tokenizer: Path, n_tokens: int) -> BenchPrompt:
    """Cut a prompt from the first tokens of the text, which is repeated if it is too short."""
    encoder = load_tokenizer(tokenizer)
    ids = encode(encoder, bench_text())
    if not ids:
        raise WrongUseError(f"the tokenizer {tokenizer} makes no tokens of English text")
    prompt_ids = (ids * (n_tokens // len(ids) + 1))[:n_tokens]
    return BenchPrompt(tuple(prompt_ids), encoder.decode(prompt_ids))
