"""The length of calibration windows and what it costs: perplexity at the greatest context.

The reference model at its greatest context (512) is calibrated on windows of several lengths, in
tokens as many as a build takes, and scored as QDQ on the CPU over held-out text in windows that
fill the context. `--cl` goes beyond what the model was trained for.
"""

import argparse
import tempfile
from pathlib import Path

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.tokenizer import load_tokenizer, text_windows
from buildlib.encodings.model import Encodings
from buildlib.graph.decoder import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.numerics.evaluation import onnx_perplexity
from buildlib.quantize.bitwidths import Bitwidths
from buildlib.quantize.qdq import apply_encodings
from buildlib.quantize.recipe import complete_encodings
from suites.models import tiny_llama

_AR = 64
_TOKENS = 2048


def main() -> None:
    """Print a line for each length of windows and each number of bits of activations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cl", type=int, default=512, help="context length")
    parser.add_argument("--windows", type=int, default=20, help="of held-out text to score")
    args = parser.parse_args()
    checkpoint = Checkpoint.load(tiny_llama.folder())
    tokens = (
        load_tokenizer(checkpoint.tokenizer_path)
        .encode(tiny_llama.heldout_text(), add_special_tokens=False)
        .ids
    )
    length = args.cl - 1
    starts = range(0, min(len(tokens) - length, args.windows * length), length)
    scored = [tokens[start : start + length] for start in starts]
    text = tiny_llama.calibration_text()
    with tempfile.TemporaryDirectory() as scratch:
        path = export_onnx(checkpoint, GraphShape(_AR, args.cl), Path(scratch) / "float")
        exact = onnx_perplexity({_AR: [path]}, checkpoint.config, scored)
        print(f"float, context {args.cl}: perplexity {exact:.3f}")
        for bits in (16, 8):
            for window in (64, 128, 256, 512, 1024, 2048):
                if window > args.cl:
                    continue
                windows = text_windows(
                    checkpoint.tokenizer_path, text, window, 0, _TOKENS // window
                )
                found = complete_encodings(
                    path, Encodings(), checkpoint.config, windows, Bitwidths(act_bitwidth=bits)
                )
                qdq = Path(scratch) / f"qdq_{bits}_{window}" / "model.onnx"
                qdq.parent.mkdir()
                apply_encodings(path, found, qdq)
                score = onnx_perplexity({_AR: [qdq]}, checkpoint.config, scored)
                print(f"W8A{bits}, windows of {window}: {score:.3f} ({score / exact - 1:+.2%})")


if __name__ == "__main__":
    main()
