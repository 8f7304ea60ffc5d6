"""Tensors of self-speculative decoding, as a training writes them into `ssd_tensor_file`.

forecast_embedding      [n_forecast, hidden]            rows of the tokens after the vocabulary
prefix_key_{layer}      [n_kv, prefix, head_dim]        rotated keys, seen by forecast tokens alone
prefix_value_{layer}    [n_kv, prefix, head_dim]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from buildlib.checkpoint.config import DecoderConfig
from buildlib.errors import InputFileError
from buildlib.speculative.torch_file import read_torch_file

FORECAST_EMBEDDING = "forecast_embedding"
_TORCH_SUFFIXES = frozenset({".pt", ".pth"})

Matrix = npt.NDArray[np.float32]


def prefix_key(layer: int) -> str:
    """Return the name of the prefix's keys in a layer."""
    return f"prefix_key_{layer}"


def prefix_value(layer: int) -> str:
    """Return the name of the prefix's values in a layer."""
    return f"prefix_value_{layer}"


@dataclass(frozen=True)
class SsdTensors:
    """Embeddings of the forecast tokens, and keys and values of the prefix by layer."""

    embedding: Matrix
    keys: tuple[Matrix, ...]
    values: tuple[Matrix, ...]

    @classmethod
    def load(
        cls, path: Path, config: DecoderConfig, *, forecast_tokens: int, prefix_length: int
    ) -> Self:
        """Read a file of safetensors, or of `torch.save`.

        Args:
            path: ends in `.safetensors`, `.pt` or `.pth`.
            config: of the model that they were trained with.
            forecast_tokens: that are used; the file may have more.
            prefix_length: in tokens.
        """
        tensors = _read(path)
        kv, dim = config.num_key_value_heads, config.head_dim
        embedding = _tensor(path, tensors, FORECAST_EMBEDDING, (None, config.hidden_size))
        if len(embedding) < forecast_tokens:
            reason = f"it has {len(embedding)} forecast tokens; {forecast_tokens} are asked for"
            raise InputFileError(str(path), reason)
        layers = range(config.num_hidden_layers)
        cache = (kv, prefix_length, dim)
        return cls(
            embedding[:forecast_tokens],
            tuple(_tensor(path, tensors, prefix_key(layer), cache) for layer in layers),
            tuple(_tensor(path, tensors, prefix_value(layer), cache) for layer in layers),
        )


def _read(path: Path) -> dict[str, Matrix]:
    if path.suffix in _TORCH_SUFFIXES:
        return read_torch_file(path)
    try:
        return {name: array.astype(np.float32) for name, array in load_file(path).items()}
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise InputFileError(str(path), f"it is no safetensors file ({error})") from error


def _tensor(
    path: Path, tensors: Mapping[str, Matrix], name: str, shape: tuple[int | None, ...]
) -> Matrix:
    if name not in tensors:
        raise InputFileError(str(path), f"it has no {name}")
    found = tensors[name]
    fits = len(found.shape) == len(shape) and all(
        want is None or size == want for size, want in zip(found.shape, shape, strict=True)
    )
    if not fits or not np.isfinite(found).all():
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        reason = f"{name} is {list(found.shape)}, the model needs [{wanted}], all finite"
        raise InputFileError(str(path), reason)
    return found
