"""The reference model as GGUF, judged by llama.cpp: the same tokens, probabilities and text."""

import math
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from suites.models import tiny_llama
from suites.models.tiny_llama.architecture import Architecture
from suites.models.tiny_llama.evaluate import surprises
from suites.models.tiny_llama.gguf_file import write_gguf
from suites.models.tiny_llama.numpy_model import load_weights
from suites.models.tiny_llama.tokens import load_tokenizer, plain, windows
from tools import llama_cpp

pytestmark = pytest.mark.needs("llama.cpp")
WINDOW, WINDOWS = 192, 6


def run(program: str, arguments: Sequence[str | Path]) -> str:
    folder = llama_cpp.folder()
    done = subprocess.run(
        [f"./{program}", *arguments],
        cwd=folder, env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout


def test_llama_cpp_gives_it_the_perplexity_of_numpy(tmp_path: Path) -> None:
    """Over the second half of windows that begin-of-text leads, tokenized by llama.cpp itself."""
    model = write_gguf(tmp_path / "tiny.gguf")
    text = tmp_path / "text.txt"
    text.write_text(tiny_llama.heldout_text(), encoding="utf-8")
    printed = run(
        "llama-perplexity",
        ["-m", model, "-f", text, "-c", str(WINDOW), "--chunks", str(WINDOWS), "-ctk", "f32"],
    )
    theirs = [float(value) for value in re.findall(r"\[[0-9]+\]([0-9.]+),", printed)]

    folder = tiny_llama.folder()
    architecture = Architecture.load(folder)
    ids = plain(load_tokenizer(folder), tiny_llama.heldout_text())
    cut = windows(np.concatenate([[architecture.bos_token_id], ids]), WINDOW)[:WINDOWS]
    cut[:, 0] = architecture.bos_token_id
    nats = surprises(architecture, load_weights(folder), cut)[:, WINDOW // 2 :]
    ours = [math.exp(nats[: count + 1].mean()) for count in range(WINDOWS)]
    assert theirs == pytest.approx(ours, rel=1e-4)
