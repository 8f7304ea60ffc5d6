"""Which grid every computed or fed value of a graph lies on."""

from collections.abc import Mapping

import onnx_ir as ir

from buildlib.encodings.grid import ACTIVATION_BITS, Grid, activation_grid
from buildlib.encodings.model import Encoding
from buildlib.errors import EncodingsError
from buildlib.graph import interface
from buildlib.graph.values import is_parameter, is_real, source_of
from buildlib.quantize.layout import moved_inputs

_SHOWN = 5


def activation_grids(graph: ir.Graph, encodings: Mapping[str, Encoding]) -> dict[str, Grid]:
    """A grid for every float activation; what moves values inherits where a file says nothing.

    Raises:
        EncodingsError: values without encodings, and nothing to inherit from.
    """
    grids = known_grids(graph, encodings)
    missing = [name for name in activation_names(graph) if name not in grids]
    if missing:
        raise missing_encodings(missing)
    return grids


def missing_encodings(names: list[str]) -> EncodingsError:
    """The error that names what has no encoding."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    text = f"{', '.join(names[:_SHOWN])}{more}"
    reason = f"{len(names)} values of the model need one and have none; give text to calibrate on"
    return EncodingsError(text, reason)


def known_grids(graph: ir.Graph, encodings: Mapping[str, Encoding]) -> dict[str, Grid]:
    """Grids of the activations that have an encoding or inherit one.

    Raises:
        EncodingsError: the encodings of a cache contradict each other.
    """
    grids = {
        name: activation_grid(encodings[name])
        for name in activation_names(graph)
        if name in encodings and encodings[name].dtype == "INT"
    }
    _share_caches(graph, grids)
    nodes = list(graph)
    for node in (*nodes, *reversed(nodes), *nodes):
        for output in node.outputs:
            sources = [str(source_of(value).name) for value in moved_inputs(node)]
            grid = next((grids[name] for name in sources if name in grids), None)
            if grid is None and sources:
                grid = _table_grid(encodings.get(sources[0]))
            if grid is not None and is_real(output):
                grids.setdefault(str(output.name), grid)
            if str(output.name) in grids:
                for value in moved_inputs(node):
                    if not is_parameter(value) and is_real(value):
                        grids.setdefault(str(value.name), grids[str(output.name)])
    return grids


def _table_grid(encoding: Encoding | None) -> Grid | None:
    """The grid of what is taken out of a table, if it can be that of the table."""
    if encoding is None or (encoding.dtype, encoding.enc_type) != ("INT", "PER_TENSOR"):
        return None
    return activation_grid(encoding) if encoding.bw in ACTIVATION_BITS else None


def _share_caches(graph: ir.Graph, grids: dict[str, Grid]) -> None:
    """A cache's output is fed as its input: both lie on one grid."""
    outputs = {str(value.name) for value in graph.outputs}
    for value in graph.inputs:
        name = str(value.name)
        twin = f"{name.removesuffix('_in')}_out"
        if not interface.is_kv(name) or twin not in outputs:
            continue
        one, other = grids.get(name), grids.get(twin)
        if one is None and other is not None:
            grids[name] = other
        elif one is not None and other is None:
            grids[twin] = one
        elif one is not None and other is not None and not same_grid(one, other):
            said = different_grids(one, other)
            reason = f"it lies on another grid than {twin}, which is fed to it: {said}"
            raise EncodingsError(name, reason)


def same_grid(one: Grid, other: Grid) -> bool:
    """Whether integers mean the same, as float32 has it."""
    pair = (one.dtype, one.zero_point) == (other.dtype, other.zero_point)
    return pair and all(abs(a - b) <= 1e-6 * a for a, b in zip(one.scale, other.scale, strict=True))


def different_grids(one: Grid, other: Grid) -> str:
    """Both in words: type, scale, and zero point."""
    return " and ".join(f"{g.dtype} {g.scale[0]:.6g} ({g.zero_point[0]})" for g in (one, other))


def activation_names(graph: ir.Graph) -> list[str]:
    """Names of all float values but constants."""
    values = (*graph.inputs, *(value for node in graph for value in node.outputs))
    return [str(v.name) for v in values if is_real(v) and not is_parameter(v)]
