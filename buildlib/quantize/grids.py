"""The grid of every activation and of every use of a constant in a graph."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from buildlib.encodings.grid import ACTIVATION_BITS, Grid, activation_grid, weight_grid
from buildlib.encodings.model import Encoding, Encodings
from buildlib.errors import EncodingsError
from buildlib.graph import interface
from buildlib.graph.values import WEIGHED, is_parameter, is_real, source_of, static_shape
from buildlib.quantize.bitwidths import INPUT_STEP, kills_emulator

LAYOUT_OPS = frozenset(
    {
        "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape",
        "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
_SHOWN = 5
_BIASED = {"Gemm", "Conv"}
_SKIPPED = {"Cast", "DequantizeLinear", "QuantizeLinear"}


def moved_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs that a layout operator moves to its outputs."""
    if node.op_type not in LAYOUT_OPS:
        return []
    inputs = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return [value for value in inputs if value is not None]


def shared_grids(graph: ir.Graph) -> list[set[str]]:
    """Return groups of names of values that must share one grid; every float value is in one.

    A cache's input and output belong together. A value that flows into a cache's output does not
    belong to them: it is requantized there, from the activations' bits to the cache's.
    """
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        parent.setdefault(name, name)
        while parent[name] != name:
            name = parent[name]
        return name

    for value in graph.inputs:
        if is_real(value):
            name = str(value.name)
            twin = interface.kv_output(name) if interface.is_kv(name) else name
            parent[root(name)] = root(twin)
    for node in graph:
        for output in node.outputs:
            if not is_real(output) or is_parameter(output):
                continue
            name = str(output.name)
            end = root(name)
            for value in moved_inputs(node):
                source = str(source_of(value).name)
                if interface.is_kv(name) and not interface.is_kv(source):
                    continue
                parent[root(source)] = end
    groups: dict[str, set[str]] = {}
    for name in parent:
        groups.setdefault(root(name), set()).add(name)
    return list(groups.values())


def channel_axis(node: ir.Node, index: int) -> int | None:
    """Return the axis of output channels if input `index` is a matrix's weight, else None."""
    if index != 1:
        return None
    if node.op_type == "Gemm":
        return 0 if node.attributes.get_int("transB", 0) else 1
    if node.op_type == "MatMul":
        weight = node.inputs[1]
        rank = len(weight.shape) if weight is not None and weight.shape is not None else 2
        return rank - 1
    return 0 if node.op_type == "Conv" else None


def head_products(graph: ir.Graph) -> set[ir.Node]:
    """Return the last products before the logits; empty for a part without logits.

    There are several if adapters are added to the projection, or if it is cut.
    """
    open_values = [value for value in graph.outputs if value.name == interface.LOGITS]
    visited: set[ir.Node] = set()
    products: set[ir.Node] = set()
    while open_values:
        node = open_values.pop().producer()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.op_type in WEIGHED:
            products.add(node)
        else:
            open_values.extend(value for value in node.inputs if value is not None)
    return products


def head_weights(graph: ir.Graph) -> set[str]:
    """Return the names of the constants in the output projection of a float model."""
    weights = (node.inputs[1] for node in head_products(graph) if len(node.inputs) > 1)
    return {str(source_of(weight).name) for weight in weights if weight is not None}


def activation_grids(graph: ir.Graph, encodings: Mapping[str, Encoding]) -> dict[str, Grid]:
    """Return a grid for every float activation; layout operators pass grids on."""
    grids = available_grids(graph, encodings)
    names = [name for name in activation_names(graph) if name not in grids]
    if names:
        raise missing_encodings_error(names)
    return grids


def missing_encodings_error(names: list[str]) -> EncodingsError:
    """Return the error that names values without an encoding."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    text = f"{', '.join(names[:_SHOWN])}{more}"
    reason = f"{len(names)} values of the model need one and have none; give text to calibrate on"
    return EncodingsError(text, reason)


def available_grids(graph: ir.Graph, encodings: Mapping[str, Encoding]) -> dict[str, Grid]:
    """Return the grids of activations that have an encoding or inherit one."""
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
    """Return the grid of a lookup table if looked-up values can lie on it."""
    if encoding is None or (encoding.dtype, encoding.enc_type) != ("INT", "PER_TENSOR"):
        return None
    return activation_grid(encoding) if encoding.bw in ACTIVATION_BITS else None


def _share_caches(graph: ir.Graph, grids: dict[str, Grid]) -> None:
    """Put a cache's output on the grid of its input, to which it is fed."""
    outputs = {str(value.name) for value in graph.outputs}
    for value in graph.inputs:
        name = str(value.name)
        twin = interface.kv_output(name)
        if not interface.is_kv(name) or twin not in outputs:
            continue
        one, other = grids.get(name), grids.get(twin)
        if one is None and other is not None:
            grids[name] = other
        elif one is not None and other is None:
            grids[twin] = one
        elif one is not None and other is not None and not same_grid(one, other):
            grids_text = describe_grids(one, other)
            reason = f"it lies on another grid than {twin}, which is fed to it: {grids_text}"
            raise EncodingsError(name, reason)


def same_grid(one: Grid, other: Grid) -> bool:
    """Return whether two grids give integers the same meaning, at float32 precision."""
    pair = (one.dtype, one.zero_point) == (other.dtype, other.zero_point)
    return pair and all(abs(a - b) <= 1e-6 * a for a, b in zip(one.scale, other.scale, strict=True))


def describe_grids(one: Grid, other: Grid) -> str:
    """Describe two grids: type, scale and zero point."""
    return " and ".join(f"{g.dtype} {g.scale[0]:.6g} ({g.zero_point[0]})" for g in (one, other))


def activation_names(graph: ir.Graph) -> list[str]:
    """Return the names of all float values except constants."""
    values = (*graph.inputs, *(value for node in graph for value in node.outputs))
    return [str(v.name) for v in values if is_real(v) and not is_parameter(v)]


@dataclass(frozen=True)
class ParameterUse:
    """A use of a constant: input `index` of `node` is `source`, or a cast of it.

    Attributes:
        grid: None without an encoding.
        axis: axis of its channels.
        transposed: whether the node takes it with both axes exchanged.
    """

    node: ir.Node
    index: int
    source: ir.Value
    grid: Grid | None
    axis: int
    transposed: bool = False

    @property
    def name(self) -> str:
        """Name of the constant."""
        return str(self.source.name)


def parameter_uses(
    graph: ir.Graph,
    encodings: Mapping[str, Encoding],
    activations: Mapping[str, Grid],
    transposed: Collection[ir.Node] = (),
) -> list[ParameterUse]:
    """Return all uses of float constants, with their grids.

    A bias lies on the int32 grid of the product it is added to (the scale of the input times that
    of each channel's weights), even with an encoding: the QNN provider takes no other.

    Args:
        encodings: encodings by name.
        activations: grids of computed values and inputs.
        transposed: nodes that need the transpose of their weight.
    """
    grids: dict[str, Grid] = {}

    def grid_of(name: str) -> Grid | None:
        if name not in grids and name in encodings:
            if encodings[name].dtype != "INT":
                return None
            grids[name] = weight_grid(encodings[name])
        return grids.get(name)

    uses: list[ParameterUse] = []
    axes: dict[str, int] = {}
    for node in graph:
        if node.op_type in _SKIPPED:
            continue
        for index, value in enumerate(node.inputs):
            if value is None or not is_parameter(value) or not is_real(value):
                continue
            source = source_of(value)
            encoding = encodings.get(str(source.name))
            is_transposed = index == 1 and node in transposed
            axis = _axis(node, 0 if is_transposed else channel_axis(node, index), encoding)
            if is_bias(node, index):
                weight = node.inputs[1]
                weights = None if weight is None else grid_of(str(source_of(weight).name))
                grid = _product_grid(node, weights, activations)
            else:
                grid = _lookup_grid(node, value, grid_of(str(source.name)), activations)
            _check_blocks(grid, source, axis)
            if grid is not None and grid.per_channel:
                _check_axis(axes.setdefault(str(source.name), axis), axis, str(source.name))
            uses.append(ParameterUse(node, index, source, grid, axis, is_transposed))
    return uses


def is_bias(node: ir.Node, index: int) -> bool:
    """Return whether input `index` is added to a product of the node."""
    return index == 2 and node.op_type in _BIASED


def _axis(node: ir.Node, own: int | None, encoding: Encoding | None) -> int:
    axis = encoding.axis if encoding is not None else None
    if own is None:
        return axis or 0
    if encoding is not None and axis is not None and axis != own and len(encoding.scale) > 1:
        reason = f"channels along axis {axis}, where {node.op_type} has them along {own}"
        raise EncodingsError(encoding.name, reason)
    return own


def _check_blocks(grid: Grid | None, source: ir.Value, axis: int) -> None:
    """Refuse LPBQ that HTP gets wrong."""
    shape = static_shape(source)
    if grid is None or grid.block_size is None or shape is None:
        return
    if len(shape) != 2 or shape[1 - axis] % INPUT_STEP:
        reason = f"LPBQ of a weight of shape {list(shape)}: {INPUT_STEP} must divide the inputs"
        raise EncodingsError(str(source.name), reason)
    if kills_emulator(shape[1 - axis], grid.block_size):
        reason = f"the HTP emulator dies of {shape[1 - axis]} inputs in blocks of {grid.block_size}"
        raise EncodingsError(str(source.name), f"{reason}; take 32")


def _check_axis(first: int, axis: int, name: str) -> None:
    if first != axis:
        reason = f"one use of it has channels along axis {first}, another along {axis}"
        raise EncodingsError(name, reason)


def _lookup_grid(
    node: ir.Node, value: ir.Value, grid: Grid | None, activations: Mapping[str, Grid]
) -> Grid | None:
    if grid is None or value not in moved_inputs(node):
        return grid
    # QNN looks up no values in a table with channels or of few bits, such as that of tied
    # embeddings. It takes a table on the grid of its result.
    plain = not grid.per_channel and grid.bits in ACTIVATION_BITS
    return grid if plain else activations.get(str(node.outputs[0].name))


def _product_grid(
    node: ir.Node, weights: Grid | None, activations: Mapping[str, Grid]
) -> Grid | None:
    data, weight = node.inputs[0], node.inputs[1]
    if data is None or weight is None or weights is None:
        return None
    step = activations.get(str(data.name))
    if step is None:
        return None
    product = tuple(step.scale[0] * scale for scale in weights.scale)
    return Grid(np.dtype(np.int32), product, (0,) * len(product))


def check_shared_caches(models: Mapping[str, Encodings]) -> None:
    """Check that all models give the integers of their caches the same meaning.

    Genie gives every graph the same key and value buffers: the decode graph reads those that the
    prefill graph writes, even if they come from different models.

    Args:
        models: complete encodings, by the name of the model in messages.
    """
    (first, reference), *others = models.items()
    reference_encodings = reference.by_name()
    for name, encodings in others:
        for cache, encoding in encodings.by_name().items():
            if not interface.is_kv(cache) or cache not in reference_encodings:
                continue
            ours, theirs = activation_grid(reference_encodings[cache]), activation_grid(encoding)
            if not same_grid(ours, theirs):
                reason = (
                    f"{name} has it on another grid than {first}, and both feed one cache: "
                    f"{describe_grids(theirs, ours)}; export them with the same encodings of it"
                )
                raise EncodingsError(cache, reason)
