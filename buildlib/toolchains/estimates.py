"""Peak memory of a toolchain's child processes, so that builds run as many at once as fit.

Measured with QNN 2.51 on decoder layers and output heads of Llama-3.2-1B's shape, W8A16: the
compiler keeps about twice the weights of every graph, and the binary in nearly four copies while it
writes it. A graph's structure takes about 100 times its size in the DLC.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path

_BASE = 250 << 20
_CONVERT_COPIES = 2.2
_GRAPH_COPIES = 2.15
_BINARY_COPIES = 3.8
_STRUCTURE_FACTOR = 100
_STRUCTURE = "model"


def convert_memory(weight_bytes: int) -> int:
    """Bytes that converting takes.

    Args:
        weight_bytes: of the quantized model.
    """
    return _BASE + int(_CONVERT_COPIES * weight_bytes)


def compile_memory(dlcs: Sequence[Path], *, weight_sharing: bool) -> int:
    """Bytes that compiling these DLCs into one binary takes."""
    sizes = [_sizes(dlc) for dlc in dlcs]
    weights = [weight for weight, _structure in sizes]
    binary = max(weights, default=0) if weight_sharing else sum(weights)
    structure = sum(structure for _weight, structure in sizes)
    return (
        _BASE
        + int(_GRAPH_COPIES * sum(weights) + _BINARY_COPIES * binary)
        + _STRUCTURE_FACTOR * structure
    )


def compile_memory_of_weights(weight_bytes: int, n_graphs: int, *, weight_sharing: bool) -> int:
    """The same before there are DLCs, for graphs that have equal weights.

    Args:
        weight_bytes: of one graph.
    """
    copies = _GRAPH_COPIES * n_graphs + _BINARY_COPIES * (1 if weight_sharing else n_graphs)
    return 2 * _BASE + int(copies * weight_bytes)


def _sizes(dlc: Path) -> tuple[int, int]:
    """Bytes of weights and of structure; a DLC that cannot be read counts by its size."""
    try:
        with zipfile.ZipFile(dlc) as archive:
            parts = {part.filename: part.file_size for part in archive.infolist()}
    except (OSError, zipfile.BadZipFile, ValueError):
        return (dlc.stat().st_size if dlc.exists() else 0), 0
    structure = parts.get(_STRUCTURE, 0)
    return sum(parts.values()) - structure, structure
