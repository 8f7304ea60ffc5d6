"""Tensors of self-speculative decoding, as a training writes them into `ssd_tensor_file`.

forecast_embedding      [n_forecast, hidden]            rows of the tokens after the vocabulary
prefix_key_{layer}      [n_kv, prefix, head_dim]        rotated keys, seen by forecast tokens alone
prefix_value_{layer}    [n_kv, prefix, head_dim]
"""

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from buildlib.checkpoint.config import DecoderConfig
from buildlib.errors import InputFileError

FORECAST_EMBEDDING = "forecast_embedding"
_TORCH_SUFFIXES = frozenset({".pt", ".pth"})
_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "FloatStorage": np.dtype(np.float32),
        "HalfStorage": np.dtype(np.float16),
        "DoubleStorage": np.dtype(np.float64),
    }
)
_MOST_BYTES = 1 << 30

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
            forecast_tokens: that are used; the file may have more.
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
    array = tensors[name]
    fits = len(array.shape) == len(shape) and all(
        dim is None or size == dim for size, dim in zip(array.shape, shape, strict=True)
    )
    if not fits or not np.isfinite(array).all():
        shape_text = ", ".join("*" if size is None else str(size) for size in shape)
        reason = f"{name} is {list(array.shape)}, the model needs [{shape_text}], all finite"
        raise InputFileError(str(path), reason)
    return array


def read_torch_file(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Read a dictionary of float tensors from a file of `torch.save`, without torch.

    The file is a ZIP of one pickle and the raw storages that it names. Only the classes of a
    dictionary of tensors are known; everything else in the pickle is refused, and nothing is run.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > _MOST_BYTES:
                raise InputFileError(str(path), f"it holds more than {_MOST_BYTES} bytes")
            name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
            with archive.open(name) as pickled:
                tensors = _Reader(pickled, archive, name.removesuffix("data.pkl")).load()
    except InputFileError:
        raise
    except OSError as error:
        raise InputFileError(str(path), error.strerror or "it cannot be read") from error
    except Exception as error:  # pickle and zipfile raise many kinds
        raise InputFileError(str(path), f"it is not a file of torch.save ({error})") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, np.ndarray) for name, value in tensors.items()
    ):
        raise InputFileError(str(path), "it holds no dictionary of tensors")
    return {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}


class _Reader(pickle.Unpickler):  # noqa: S301  (`find_class` knows four names)
    def __init__(self, file: Any, archive: zipfile.ZipFile, prefix: str) -> None:  # noqa: ANN401
        super().__init__(file)
        self._archive = archive
        self._prefix = prefix

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  (pickle's own)
        if module == "torch" and name in _DTYPES:
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> npt.NDArray[Any]:  # noqa: ANN401  (pickle's own)
        kind, storage, key, _, count = pid
        if kind != "storage" or storage not in _DTYPES:
            raise pickle.UnpicklingError(f"it has a {kind} of {storage}")
        data = self._archive.read(f"{self._prefix}data/{key}")
        return np.frombuffer(data, _DTYPES[storage], int(count))


def _rebuilt(
    storage: npt.NDArray[Any],
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    *_: object,
) -> npt.NDArray[Any]:
    """Rebuild a tensor, with strides that count elements."""
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    sound = offset >= 0 and all(n > 0 for n in size) and all(step >= 0 for step in stride)
    if not sound or last >= len(storage) or math.prod(size) > _MOST_BYTES:
        raise pickle.UnpicklingError("a tensor lies outside its storage")
    strides = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, strides, writeable=False)
