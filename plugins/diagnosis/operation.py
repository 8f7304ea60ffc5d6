"""One operation of an op package on the emulator, compared with a formula in NumPy."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from buildlib.targets import Soc
from buildlib.toolchains.base import OpPackageLibrary, ScaleOffset, TensorInfo
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain

DType = Literal["uint8", "uint16", "float16", "float32"]
Reals = npt.NDArray[np.float64]
Formula = Callable[[Mapping[str, Reals]], Sequence[Reals]]
_FLOAT_STEP = 2.0**-10
"""Of the largest value: HTP computes floats with the 11 bits of half precision."""


@dataclass(frozen=True)
class OperationRun:
    """Outputs of an operation, and those of its formula.

    Attributes:
        outputs, expected: real numbers, the latter of the inputs as they were stored.
        steps: the largest difference of each output, in steps of its grid.
    """

    outputs: tuple[Reals, ...]
    expected: tuple[Reals, ...]
    steps: tuple[float, ...]


def run_operation(
    package: OpPackageLibrary,
    operation: str,
    inputs: Mapping[str, Reals],
    formula: Formula,
    *,
    dtype: DType,
    soc: Soc,
    toolchain: OrtQnnToolchain | None = None,
) -> OperationRun:
    """Compile a graph of one node, load its binary in another process, and run it.

    Args:
        operation: as the backend lists it, e.g. `my.package::Scale`.
        inputs: real numbers by name; each is stored on the grid that its values span.
        formula: the outputs of real inputs.
        dtype: of all tensors as they are stored.
        soc: that the emulator stands in for.
        toolchain: the compiler and emulator; by default those from PyPI.

    Raises:
        ToolchainMissingError: the wheel is not usable here.
        ToolchainError: the package, the node or the binary is refused, or ended the process.
    """
    tools = toolchain or OrtQnnToolchain()
    grids = {name: _Grid.over(values, dtype) for name, values in inputs.items()}
    inputs_stored = {name: grids[name].store(values) for name, values in inputs.items()}
    exact = {name: grids[name].real(values) for name, values in inputs_stored.items()}
    formula_outputs = tuple(np.asarray(one, np.float64) for one in formula(exact))
    outputs = {f"output_{i}": _Grid.over(one, dtype) for i, one in enumerate(formula_outputs)}
    with tempfile.TemporaryDirectory(prefix="qnnfarm-") as scratch:
        binary = Path(scratch) / "operation.bin"
        tools.compile_operation(
            package,
            operation,
            [grids[name].tensor(name, values.shape) for name, values in inputs_stored.items()],
            [
                grid.tensor(name, one.shape)
                for (name, grid), one in zip(outputs.items(), formula_outputs, strict=True)
            ],
            binary,
            soc.soc_model,
        )
        graph = operation.rpartition("::")[2]
        arrays = tools.execute(
            binary, graph, inputs_stored, soc_model=soc.soc_model, op_packages=[package]
        )
    real_outputs = tuple(grid.real(arrays[name]) for name, grid in outputs.items())
    steps = tuple(
        float(np.max(np.abs(ours - theirs), initial=0.0)) / grid.step
        for ours, theirs, grid in zip(real_outputs, formula_outputs, outputs.values(), strict=True)
    )
    return OperationRun(real_outputs, formula_outputs, steps)


@dataclass(frozen=True)
class _Grid:
    """Grid on which a tensor's real numbers are stored.

    Attributes:
        encoding: None of floats.
    """

    dtype: DType
    step: float
    encoding: ScaleOffset | None

    @classmethod
    def over(cls, values: Reals, dtype: DType) -> "_Grid":
        low, high = min(0.0, float(np.min(values))), max(0.0, float(np.max(values)))
        if dtype.startswith("float"):
            return cls(dtype, (max(high, -low) or 1.0) * _FLOAT_STEP, None)
        scale = float(np.float32((high - low or 1.0) / np.iinfo(dtype).max))
        return cls(dtype, scale, ScaleOffset(scale, round(low / scale)))

    def tensor(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        return TensorInfo(name, shape, self.dtype, self.encoding)

    def store(self, values: Reals) -> npt.NDArray[np.generic]:
        if self.encoding is None:
            return values.astype(self.dtype)
        integers = np.round(values / self.encoding.scale) - self.encoding.offset
        return np.clip(integers, 0, np.iinfo(self.dtype).max).astype(self.dtype)

    def real(self, stored: npt.NDArray[np.generic]) -> Reals:
        values = stored.astype(np.float64)
        if self.encoding is None:
            return values
        return (values + self.encoding.offset) * self.encoding.scale
