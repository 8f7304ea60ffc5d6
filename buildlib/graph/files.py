"""ONNX files with external weights: load, save, and link without copying."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from buildlib.errors import ModelFileError
from buildlib.files import atomic_path, atomic_write_bytes, check_file

_SHOWN = 80  # characters of a name from a file, in messages
_CONSTANTS = frozenset({"Constant", "ConstantOfShape"})


def load_model(path: Path) -> ir.Model:
    """Load a model without its external weights; check that their files hold them."""
    model: ir.Model = _load(ir.load, path)
    sizes: dict[str, int] = {}
    for tensor in external_tensors(model):
        if str(tensor.location) not in sizes:
            sizes[str(tensor.location)] = _file_size(path, tensor)
        _check_external(path, tensor, sizes[str(tensor.location)])
    return model


def load_proto(path: Path) -> onnx.ModelProto:
    """Load the bare message of a model, without its external weights.

    It tells names, types and shapes in a tenth of the time of `load_model`, and checks no weights.
    """
    message: onnx.ModelProto = _load(partial(onnx.load, load_external_data=False), path)
    return message


def save_model(model: ir.Model, path: Path) -> Path:
    """Write `model` to `path`, its external weights linked into the same folder.

    A hard link where the file system allows one, a copy where not; the file appears whole or
    not at all. ONNX Runtime refuses weights outside the model's folder, so links they must be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sources: dict[str, Path] = {}
    for source in {Path(tensor.path) for tensor in external_tensors(model)}:
        other = sources.setdefault(source.name, source)
        if other != source and not other.samefile(source):
            raise ModelFileError(path, f"it has weights in two files called {source.name!r}")
    for source in sources.values():
        if source.parent.resolve() != path.parent.resolve():
            link_into(source, path.parent)
    try:
        data = ir.to_proto(model).SerializeToString(deterministic=True)
    except Exception as error:  # protobuf and onnx_ir raise many kinds
        raise ModelFileError(path, f"cannot be written as ONNX ({type(error).__name__})") from error
    atomic_write_bytes(path, data)
    return path


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield initializers and values of constant nodes that lie outside the model file."""
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            yield value.const_value
    for node in model.graph:
        if node.op_type in _CONSTANTS and "value" in node.attributes:
            tensor = node.attributes["value"].value
            if isinstance(tensor, ir.ExternalTensor):
                yield tensor


def tensor_array(tensor: ir.TensorProtocol) -> npt.NDArray[Any]:
    """Return the values of a tensor; those of an external file are mapped, read-only.

    onnx_ir refuses to read files with several hard links, which is how weights are shared here. The
    danger it guards against is excluded by `load_model`: the file is inside the model's folder.
    """
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor.numpy()
    shape = tuple(dim for dim in tensor.shape if isinstance(dim, int))
    dtype = tensor.dtype.numpy()
    return np.memmap(tensor.path, dtype, mode="r", offset=tensor.offset or 0, shape=shape)


def link_into(source: Path, folder: Path, name: str | None = None) -> Path:
    """Make `source` appear in `folder` by hard link, or by copy across file systems."""
    real = source.resolve()
    target = folder / (name or source.name)
    if target.exists() and target.samefile(real):
        return target
    with atomic_path(target) as temporary:
        try:
            temporary.hardlink_to(real)
        except OSError:
            shutil.copyfile(real, temporary)
    return target


def _load(load: Callable[[Path], Any], path: Path) -> Any:  # noqa: ANN401
    if not path.is_file():
        raise ModelFileError(path, "no such file")
    try:
        return load(path)
    except Exception as error:  # protobuf and onnx_ir raise many kinds
        raise ModelFileError(path, f"not a readable ONNX model ({type(error).__name__})") from error


def _file_size(model_path: Path, tensor: ir.ExternalTensor) -> int:
    """Return the size of the file beside the model that holds a tensor."""
    name = str(tensor.name)[:_SHOWN]
    if not isinstance(tensor.location, str):  # onnx_ir keeps bytes that are no UTF-8
        reason = f"the weights file of tensor {name!r} has no readable name"
        raise ModelFileError(model_path, reason)
    location = Path(tensor.location)
    if location.name != str(location):
        raise ModelFileError(model_path, f"tensor {name!r} lies outside the model's folder")
    file = f"its weights file {tensor.location[:_SHOWN]!r}"
    try:
        check_file(model_path.parent / location)
        return (model_path.parent / location).stat().st_size
    except (FileNotFoundError, ValueError) as error:
        raise ModelFileError(model_path, f"{file} is missing") from error
    except OSError as error:
        raise ModelFileError(model_path, f"{file}: {error.strerror}") from error


def _check_external(model_path: Path, tensor: ir.ExternalTensor, size: int) -> None:
    offset, length = tensor.offset or 0, tensor.length
    name = str(tensor.name)[:_SHOWN]
    try:
        n_bytes = tensor.nbytes
    except TypeError as error:
        reason = f"tensor {name!r} is of type {tensor.dtype.name}, which no file holds"
        raise ModelFileError(model_path, reason) from error
    length = n_bytes if length is None else length
    if offset < 0 or length < n_bytes or offset + length > size:
        location = str(tensor.location)[:_SHOWN]
        reason = f"tensor {name!r} lies outside {location!r} (truncated?)"
        raise ModelFileError(model_path, reason)
