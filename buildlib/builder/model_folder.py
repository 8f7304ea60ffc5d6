"""Folder that stages hand on: `model.onnx`, `model.encodings`, `config.json`, `tokenizer.json`.

`factors.safetensors` beside them says what constants and caches have been multiplied with.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, GENERATION_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.checkpoint.tokenizer import load_tokenizer, spread_windows, text_windows
from buildlib.container.manifest import LossRecord
from buildlib.errors import InvalidOptionError, LossTooLargeError, ModelWarning
from buildlib.files import atomic_write_bytes
from buildlib.graph import interface
from buildlib.graph.files import link_into, load_model
from buildlib.quantize.calibration import Range, beginnings, window_count, window_length
from buildlib.quantize.loss import LARGE_LOSS
from buildlib.quantize.optimization import technique_windows
from buildlib.quantize.options import QuantizationOptions
from buildlib.quantize.techniques.base import Factors
from buildlib.quantize.techniques.scaling import write_scaled
from buildlib.quantize.techniques.spreading import write_spread_alike

_RANGES_FILE = "ranges.json"
FACTORS_FILE = "factors.safetensors"
_LOSS_FILE = "loss.json"
_LOSS_WINDOWS, _LOSS_TOKENS = 4, 128
"""Text that tells the loss of a quantization: 512 tokens from four places, each begun as a text."""


def link_configuration(model_folder: Path, into: Path) -> None:
    """Link configuration and tokenizer of a model folder, and what is known of it, into another."""
    more = (GENERATION_FILE, FACTORS_FILE, _LOSS_FILE)
    known = (name for name in more if (model_folder / name).is_file())
    for name in (CONFIG_FILE, TOKENIZER_FILE, *known):
        link_into(model_folder / name, into)


def save_factors(folder: Path, factors: Factors) -> None:
    """Write what constants and caches of a model have been multiplied with, if anything."""
    if factors:
        arrays = {name: np.ascontiguousarray(values) for name, values in factors.items()}
        save_file(arrays, folder / FACTORS_FILE)


def load_factors(folder: Path) -> Factors:
    """Return what constants and caches of a model have been multiplied with, by name."""
    path = folder / FACTORS_FILE
    return load_file(path) if path.is_file() else {}


def write_alike(model: Path, changed: Path, folder: Path) -> Path:
    """Write a float model with all that another one went through before its weights were rounded.

    Args:
        model: as the other one was before.
        changed: folder whose hidden states may be rotated or split, and constants rescaled.
        folder: as `WeightTechnique.optimize` takes it.
    """
    spread = folder / "spread"
    spread.mkdir()
    model = write_spread_alike(model, changed / MODEL_FILE, spread)
    return write_scaled(model, load_factors(changed), folder)


def save_ranges(
    folder: Path, windows: Sequence[Sequence[int]], ranges: Mapping[str, Range]
) -> None:
    """Write the ranges of a model's activations that a technique has observed over windows."""
    data = {"windows": windows, "ranges": ranges}
    atomic_write_bytes(folder / _RANGES_FILE, json.dumps(data).encode())


def load_ranges(folder: Path, windows: Sequence[Sequence[int]]) -> Mapping[str, Range] | None:
    """Return the ranges of a model's activations if they were observed over these windows."""
    path = folder / _RANGES_FILE
    if not path.is_file():
        return None
    data = json.loads(path.read_bytes())
    if data["windows"] != [list(window) for window in windows]:
        return None
    return {name: (low, high) for name, (low, high) in data["ranges"].items()}


def save_loss(folder: Path, loss: LossRecord) -> None:
    """Write what the quantization of a model costs."""
    atomic_write_bytes(folder / _LOSS_FILE, loss.model_dump_json(indent=1).encode())


def load_loss(folder: Path) -> LossRecord | None:
    """Return what the quantization of a model costs; None if that was not measured."""
    path = folder / _LOSS_FILE
    return LossRecord.model_validate_json(path.read_bytes()) if path.is_file() else None


def check_loss(folder: Path, model: str, max_kl: float | None) -> None:
    """Warn of a model that its quantization costs much; refuse one that it costs more than asked.

    Args:
        model: its name.
        max_kl: bound of the KL divergence from float, in nats; None only warns.

    Raises:
        LossTooLargeError: the divergence is above the bound.
        InvalidOptionError: there is a bound, and the loss was not measured.
    """
    loss = load_loss(folder)
    if loss is None and max_kl is not None:
        raise InvalidOptionError("max_kl", "there is no calibration text to measure it on", ())
    if loss is None:
        return
    advice = "".join(f"; {remark}" for remark in loss.remarks[:1])
    if max_kl is not None and loss.kl_divergence > max_kl:
        raise LossTooLargeError(model, str(loss), max_kl, advice)
    if loss.kl_divergence > LARGE_LOSS:
        text = f"quantization costs {model} much: {loss}{advice}"
        warnings.warn(text, ModelWarning, stacklevel=2)


def loss_windows(model_folder: Path, text: str | None) -> list[list[int]]:
    """Cut the part of a calibration text on which the loss is measured: tokens without bos."""
    shape = interface.model_shape(load_model(model_folder / MODEL_FILE))
    if text is None or shape is None:
        return []
    begin = load_config(model_folder / CONFIG_FILE).begin
    fed = max(shape.ar, min(_LOSS_TOKENS, shape.cl) // shape.ar * shape.ar)
    tokenizer = model_folder / TOKENIZER_FILE
    return text_windows(tokenizer, text, fed + 1 - len(begin), None, _LOSS_WINDOWS)


def calibration_windows(
    model_folder: Path,
    text: str | None,
    tokens: int | None = None,
    *,
    quantization: QuantizationOptions | None = None,
) -> list[list[int]]:
    """Cut a calibration text into windows of tokens for a model.

    Args:
        model_folder: with its tokenizer.
        text: none gives no windows.
        tokens: of it that calibrate; None for as many as are usual, and beginnings of texts.
        quantization: its techniques decide length and number; by default calibration does.
    """
    shape = interface.model_shape(load_model(model_folder / MODEL_FILE))
    if text is None or shape is None:
        return []
    config = load_config(model_folder / CONFIG_FILE)
    tokenizer = load_tokenizer(model_folder / TOKENIZER_FILE)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if quantization is not None:
        length, count = technique_windows(
            window_length(shape),
            quantization.weight_techniques,
            quantization.technique_kwargs,
            config.hidden_size,
        )
        return spread_windows(ids, length, count, config.bos_token_id)
    length = window_length(shape, tokens)
    windows = spread_windows(ids, length, window_count(length, tokens), config.bos_token_id)
    if tokens is not None:
        return windows
    added = tokenizer.get_added_tokens_decoder().items()
    special = frozenset(number for number, token in added if token.special)
    return [*windows, *beginnings(windows, ids, special, config.bos_token_id, shape.ar)]
