"""Tensors of a `torch.save` file, read without torch and without running what it pickles.

The file is a ZIP of one pickle and the raw storages that it names. Only what a dictionary of
tensors needs is understood; everything else in the pickle is refused.
"""

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from buildlib.errors import InputFileError

_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "FloatStorage": np.dtype(np.float32),
        "HalfStorage": np.dtype(np.float16),
        "DoubleStorage": np.dtype(np.float64),
    }
)
_MOST_BYTES = 1 << 30


def read_torch_file(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Read a dictionary of float tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > _MOST_BYTES:
                raise InputFileError(str(path), f"it holds more than {_MOST_BYTES} bytes")
            name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
            with archive.open(name) as pickled:
                found = _Reader(pickled, archive, name.removesuffix("data.pkl")).load()
    except InputFileError:
        raise
    except OSError as error:
        raise InputFileError(str(path), error.strerror or "it cannot be read") from error
    except Exception as error:  # pickle and zipfile raise many kinds
        raise InputFileError(str(path), f"it is not a file of torch.save ({error})") from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, np.ndarray) for name, value in found.items()
    ):
        raise InputFileError(str(path), "it holds no dictionary of tensors")
    return {name: np.ascontiguousarray(value, np.float32) for name, value in found.items()}


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
            return _tensor
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> npt.NDArray[Any]:  # noqa: ANN401  (pickle's own)
        kind, storage, key, _, count = pid
        if kind != "storage" or storage not in _DTYPES:
            raise pickle.UnpicklingError(f"it has a {kind} of {storage}")
        data = self._archive.read(f"{self._prefix}data/{key}")
        return np.frombuffer(data, _DTYPES[storage], int(count))


def _tensor(
    storage: npt.NDArray[Any],
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    *_: object,
) -> npt.NDArray[Any]:
    """Rebuild a tensor, whose strides count elements."""
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    sound = offset >= 0 and all(n > 0 for n in size) and all(step >= 0 for step in stride)
    if not sound or last >= len(storage) or math.prod(size) > _MOST_BYTES:
        raise pickle.UnpicklingError("a tensor lies outside its storage")
    strides = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, strides, writeable=False)
