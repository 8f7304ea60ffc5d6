"""From a checkpoint to the folder the Gen AI Builder takes, without torch.

The folder holds `config.json`, `tokenizer.json`, `model.onnx` with the checkpoint's own safetensors
beside it, and `model.encodings`.
"""

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from buildlib.checkpoint.checkpoint import Checkpoint
from buildlib.checkpoint.layout import CONFIG_FILE, ENCODINGS_FILE
from buildlib.encodings.files import save_encodings
from buildlib.encodings.model import Encodings
from buildlib.errors import CalibrationError, CheckpointError
from buildlib.files import atomic_write_bytes
from buildlib.graph.llama import export_onnx
from buildlib.graph.shape import GraphShape
from buildlib.quantize.recipe import Bitwidths, complete_encodings

DEFAULT_WINDOWS = 8


def export_checkpoint(
    checkpoint_dir: Path,
    calibration_text: str,
    out_dir: Path,
    shape: GraphShape,
    bitwidths: Bitwidths | None = None,
    *,
    n_windows: int = DEFAULT_WINDOWS,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Fill `out_dir` and return it.

    Args:
        checkpoint_dir: in Hugging Face layout, with its `tokenizer.json`.
        calibration_text: of the kind that the model was trained on.
        out_dir: made if need be.
        shape: of the ONNX; a prefill shape, as calibration runs at it.
        bitwidths: of weights and activations; by default W8A16.
        n_windows: windows of text, spread over all of it, that calibrate activations.
        progress: told (windows calibrated, windows in all).

    Raises:
        CheckpointError: the checkpoint, or its tokenizer, is missing or corrupt.
        CalibrationError: the text is shorter than one call of the graph.
        InvalidOptionError: bits that a weight cannot have.
    """
    checkpoint = Checkpoint.load(checkpoint_dir)
    windows = text_windows(
        checkpoint.tokenizer_path,
        calibration_text,
        shape.cl,
        checkpoint.config.bos_token_id,
        n_windows,
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    for path in (checkpoint.folder / CONFIG_FILE, checkpoint.tokenizer_path):
        atomic_write_bytes(out_dir / path.name, path.read_bytes())
    model = export_onnx(checkpoint, shape, out_dir)
    encodings = complete_encodings(
        model, Encodings(), checkpoint.config, windows, bitwidths, progress=progress
    )
    save_encodings(encodings, out_dir / ENCODINGS_FILE)
    return out_dir


def text_windows(
    tokenizer: Path,
    text: str,
    length: int,
    bos_token_id: int,
    n_windows: int = DEFAULT_WINDOWS,
) -> list[list[int]]:
    """Windows of tokens from all over a text, as `spread_windows` cuts them.

    Raises:
        CheckpointError: there is no tokenizer to read.
    """
    tokens = load_tokenizer(tokenizer).encode(text, add_special_tokens=False).ids
    return spread_windows(tokens, length, n_windows, bos_token_id)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: missing, or not what `tokenizers` reads.
    """
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(path, error.strerror or "cannot be read") from error
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(path, f"no tokenizer ({str(error)[:120]})") from error


def spread_windows(
    tokens: list[int], length: int, n_windows: int, bos_token_id: int
) -> list[list[int]]:
    """Up to `n_windows` windows of `length`, evenly spread, every second one led by bos.

    Prompts come with and without bos, and its activations can be like no others.
    """
    n_windows = min(n_windows, max(1, len(tokens) // length))
    if n_windows < 1:
        raise CalibrationError("no windows were asked for")
    last = max(0, len(tokens) - length)
    starts = [last * index // max(1, n_windows - 1) for index in range(n_windows)]
    windows = [tokens[start : start + length] for start in starts]
    return [
        [bos_token_id, *window][:length] if index % 2 == 0 else window
        for index, window in enumerate(windows)
    ]
