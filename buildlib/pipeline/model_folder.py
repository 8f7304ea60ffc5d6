"""Folder that stages hand on: `model.onnx`, `model.encodings`, `config.json`, `tokenizer.json`."""

from pathlib import Path

from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.layout import CONFIG_FILE, MODEL_FILE, TOKENIZER_FILE
from buildlib.checkpoint.tokenizer import text_windows
from buildlib.graph import interface
from buildlib.graph.files import link_into, load_model
from buildlib.quantize.calibration import window_count, window_length
from buildlib.quantize.optimization import technique_windows
from buildlib.quantize.options import QuantizationOptions


def link_configuration(model_folder: Path, into: Path) -> None:
    """Link configuration and tokenizer of a model folder into another."""
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        link_into(model_folder / name, into)


def calibration_windows(
    model_folder: Path, text: str | None, *, quantization: QuantizationOptions | None = None
) -> list[list[int]]:
    """Cut a calibration text into windows of tokens for a model.

    Args:
        model_folder: with its tokenizer.
        text: none gives no windows.
        quantization: whose techniques need as much; by default what calibration needs.
    """
    shape = interface.model_shape(load_model(model_folder / MODEL_FILE))
    if text is None or shape is None:
        return []
    config = load_config(model_folder / CONFIG_FILE)
    tokenizer = model_folder / TOKENIZER_FILE
    if quantization is None:
        length = window_length(shape)
        return text_windows(tokenizer, text, length, config.bos_token_id, window_count(length))
    length, count = technique_windows(
        window_length(shape),
        quantization.weight_techniques,
        quantization.technique_kwargs,
        config.hidden_size,
    )
    return text_windows(tokenizer, text, length, config.bos_token_id, count)
