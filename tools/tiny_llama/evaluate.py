"""Held-out perplexity without torch: `python -m tools.tiny_llama.evaluate`.

The text is cut into whole windows. In each, a token is scored given the tokens before it in the
window, so the first is not scored. The second half of the windows is given apart: it shows how the
model does far into its context. A runtime that puts begin-of-text before each window gets other
figures, and the two do not compare.

The unigram model beside it is scored on exactly the same tokens, and its frequencies are counted on
the scored text itself: no unigram model, whatever it was trained on, does better there.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from suites.models import tiny_llama
from tools.tiny_llama.architecture import Architecture
from tools.tiny_llama.numpy_model import Array, load_weights, logits
from tools.tiny_llama.tokens import Ids, load_tokenizer, plain, windows


@dataclass(frozen=True)
class Perplexity:
    """Perplexities over one set of windows."""

    window: int
    """Tokens a window."""
    n_windows: int
    model: float
    """Over positions 1, 2, ... of each window."""
    model_second_half: float
    """Over positions `window // 2` on."""
    unigram: float
    """The unigram model's, over the positions of `model`."""
    unigram_second_half: float


def surprises(
    architecture: Architecture, weights: Mapping[str, Array], texts: Ids
) -> NDArray[np.float64]:
    """Return the nats of surprise at tokens 1, 2, ... of each window, `[n_windows, length - 1]`."""
    rows = []
    for text in texts:
        scores = logits(architecture, weights, text[:-1]).astype(np.float64)
        top = scores.max(axis=-1)
        log_total = top + np.log(np.exp(scores - top[:, None]).sum(axis=-1))
        rows.append(log_total - np.take_along_axis(scores, text[1:, None], axis=-1)[:, 0])
    return np.stack(rows)


def unigram_surprises(counted: Ids, texts: Ids) -> NDArray[np.float64]:
    """Return surprises of a model that knows only the token frequencies in `counted`."""
    counts = np.bincount(counted.ravel())
    surprise: NDArray[np.float64] = np.log(counted.size / counts[texts[:, 1:]])
    return surprise


def evaluate(folder: Path, text: str, *, window: int, max_windows: int | None = None) -> Perplexity:
    """Return the perplexity of a checkpoint on `text`, beside that of the best unigram model.

    `max_windows` scores that many windows, spread over the text.

    Raises:
        ValueError: the text is shorter than one window.
    """
    architecture = Architecture.load(folder)
    whole = windows(plain(load_tokenizer(folder), text), window)
    if not len(whole):
        raise ValueError(f"the text holds less than one window of {window} tokens")
    chosen = len(whole) if max_windows is None else min(max_windows, len(whole))
    texts = whole[np.linspace(0, len(whole) - 1, chosen, dtype=np.int64)]
    model = surprises(architecture, load_weights(folder), texts)
    unigram = unigram_surprises(whole, texts)
    second = window // 2 - 1  # column 0 is position 1
    return Perplexity(
        window=window,
        n_windows=len(texts),
        model=float(np.exp(model.mean())),
        model_second_half=float(np.exp(model[:, second:].mean())),
        unigram=float(np.exp(unigram.mean())),
        unigram_second_half=float(np.exp(unigram[:, second:].mean())),
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Held-out perplexity of tiny_llama.")
    parser.add_argument("--checkpoint", type=Path, default=tiny_llama.folder())
    parser.add_argument("--text", type=Path, help="a file, instead of the held-out text")
    parser.add_argument("--window", type=int, nargs="+", default=[192, 256, 512])
    parser.add_argument("--max-windows", type=int)
    options = parser.parse_args()

    text = options.text.read_text(encoding="utf-8") if options.text else tiny_llama.heldout_text()
    sys.stdout.write("window  windows    model  unigram   model, 2nd half  unigram, 2nd half\n")
    for window in options.window:
        found = evaluate(
            options.checkpoint,
            text,
            window=window,
            max_windows=options.max_windows,
        )
        sys.stdout.write(
            f"{window:6d}  {found.n_windows:7d}  {found.model:7.2f}  {found.unigram:7.2f}"
            f"   {found.model_second_half:15.2f}  {found.unigram_second_half:17.2f}\n"
        )


if __name__ == "__main__":
    main()
