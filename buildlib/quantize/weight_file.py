"""The file of integer weights that a quantized model refers to."""

import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

_ALIGNMENT = 64


class WeightFile(AbstractContextManager["WeightFile"]):
    """Written tensor by tensor, so that one of them is in memory at a time.

    It takes its name at `finish`; left without, nothing is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = 0

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        self._temporary = Path(temporary)
        self._file = os.fdopen(handle, "wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, name: str, array: npt.NDArray[Any]) -> ir.ExternalTensor:
        """Append an array; the tensor refers to it under the file's final name."""
        padding = -self._size % _ALIGNMENT
        self._file.write(bytes(padding))
        data = np.ascontiguousarray(array).tobytes()
        offset = self._size + padding
        self._file.write(data)
        self._size = offset + len(data)
        return ir.ExternalTensor(
            location=self.path.name,
            offset=offset,
            length=len(data),
            dtype=ir.DataType.from_numpy(array.dtype),
            shape=ir.Shape(array.shape),
            name=name,
            base_dir=self.path.parent,
        )

    def finish(self) -> None:
        """Make the file appear, whole, under its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.chmod(0o644)
        self._temporary.replace(self.path)
