"""Embeddings of a prompt from a file, as a container's configuration has them."""

from pathlib import Path

from buildlib.container.container import GenAIContainer
from buildlib.container.genie_config import Embedding, GenieConfig
from harness.errors import HostFileError, WrongUseError

_TYPES = {
    "float32": "<f4",
    "ufixed8": "u1",
    "ufixed16": "<u2",
    "sfixed8": "i1",
    "sfixed16": "<i2",
}
_LARGEST = 1 << 30


def row_bytes(config: GenieConfig, container: GenAIContainer) -> int:
    """Return the bytes of one embedding as Genie takes it.

    Whatever the type of a table of integers, Genie takes prompts as the graph's input has them; its
    16 bits are those of every container of the builder.
    """
    embedding = _embedding(config, container)
    return embedding.size * (4 if embedding.datatype in {"float32", None} else 2)


def read_embeddings(path: Path, config: GenieConfig, container: GenAIContainer) -> bytes:
    """Read rows from a file, the row of bos in front.

    A `.npy` file has floats, which are quantized as the container's table is, or the integers of
    that very table. Any other file has raw rows, taken as they are.
    """
    embedding = _embedding(config, container)
    size = row_bytes(config, container)
    try:
        if path.stat().st_size > _LARGEST:
            raise HostFileError(str(path), "it is too large for the embeddings of a prompt")
        rows = _array(path, embedding) if path.suffix == ".npy" else path.read_bytes()
    except OSError as error:
        raise HostFileError(str(path), error.strerror or str(error)) from error
    if not rows or len(rows) % size:
        raise WrongUseError(
            f"{path} has {len(rows):,} bytes, which is not a number of embeddings of {size:,} bytes"
        )
    return rows


def _array(path: Path, embedding: Embedding) -> bytes:
    import numpy as np

    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise WrongUseError(f"{path} is no .npy file: {error}") from error
    if values.ndim != 2 or values.shape[1] != embedding.size:
        raise WrongUseError(
            f"{path} has shape {values.shape}, and embeddings of this container have "
            f"[tokens, {embedding.size}]"
        )
    datatype = embedding.datatype or "float32"
    target = np.dtype(_TYPES.get(datatype, "<u2"))
    if values.dtype == target:
        return bytes(values.astype(target).tobytes())
    grid = embedding.quant_param
    if values.dtype.kind != "f" or (grid is None and datatype != "float32"):
        raise WrongUseError(
            f"{path} has {values.dtype}, and this container takes {target.name}"
            + ("" if grid is None else " or floats")
        )
    if grid is None:
        return bytes(values.astype(target).tobytes())
    if datatype not in {"ufixed16", "sfixed16"}:
        raise WrongUseError(
            f"the grid of the graph's input is not known, as the table has {datatype}: give "
            f"{path} as raw rows of 16 bits"
        )
    limits = np.iinfo(target)
    integers = np.round(values.astype(np.float64) / grid.scale) - grid.offset
    return bytes(np.clip(integers, limits.min, limits.max).astype(target).tobytes())


def _embedding(config: GenieConfig, container: GenAIContainer) -> Embedding:
    embedding = config.dialog.embedding
    if embedding is None:
        raise WrongUseError(
            f"{container.path} looks tokens up in its graph: `qnnfarm build --embedding-lut` makes "
            "a container that takes embeddings"
        )
    return embedding
