"""The canonical graph of a decoder, and the door to readers of exports that have another form."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from buildlib.checkpoint.config import DecoderConfig
from buildlib.entry_points import PREFIX, entry_modules, entry_names, load_entry
from buildlib.errors import ModelFileError
from buildlib.graph import interface
from buildlib.graph.builder import OPSET
from buildlib.graph.files import tensor_array
from buildlib.graph.folding import Refusal
from buildlib.graph.rope import rope_tables, rotation_length
from buildlib.graph.shape import GraphShape
from buildlib.graph.values import static_shape
from buildlib.numerics.runners import PartRunner
from buildlib.passes.arcl import ArClConversion
from buildlib.passes.base import SORTED, STATIC, Pass

DOOR = "onnx_readers"
_PLAIN = (
    "Add", "CumSum", "Less", "MatMul", "Mul", "Reshape", "Sigmoid", "Slice", "Sub", "Tanh", "Where",
)  # fmt: skip
_OPERATORS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    **{name: {} for name in _PLAIN},
    "Cast": {"to": ()},
    "Concat": {"axis": (-1, 2, 3)},
    "Gather": {"axis": (0,)},
    "Gelu": {"approximate": ("none", "tanh")},
    "Gemm": {"transB": (0, 1)},
    "LayerNormalization": {"axis": (-1,), "epsilon": ()},
    "RMSNormalization": {"axis": (-1,), "epsilon": ()},
    "Softmax": {"axis": (-1,)},
    "Split": {"axis": (-1,), "num_outputs": ()},
    "Transpose": {"perm": ((0, 1, 3, 2), (1, 2, 0, 3), (2, 0, 1, 3))},
}
"""Operators and attributes of a canonical model; an empty tuple allows any value."""

_TOLERANCE = 2e-3  # precision of a float16 cosine; coarser types have their own tolerance


@dataclass(frozen=True)
class RopeTables:
    """Rotary embedding that a source computes itself, to compare with that of hosts.

    Attributes:
        first: the position of the first row.
        cos, sin: [positions, rope_dim/2].
        tolerance: largest error of the type in which they are computed.
    """

    first: int
    cos: npt.NDArray[np.floating]
    sin: npt.NDArray[np.floating]
    tolerance: float = 0.0


@dataclass(frozen=True)
class Export:
    """An export, as its reader understood it.

    Attributes:
        model: the canonical graph, its weights those of the export's files.
        rope: the rotary embedding that the export computes itself.
        takes_rotations: whether it takes it from its host.
    """

    model: ir.Model
    rope: RopeTables | None
    takes_rotations: bool


class ExportReader(Protocol):
    """Entry point of `qnnfarm.onnx_readers`, which is a module."""

    def read_export(
        self,
        model: ir.Model,
        shape: GraphShape | None,
        *,
        keeps_fixed: bool,
        operations: Collection[str],
    ) -> Export:
        """Rewrite an export to the canonical graph.

        Args:
            shape: of the graph; None keeps the export's own.
            keeps_fixed: the shape applies to exports with symbolic sizes only.
            operations: of op packages, as `my.package::Scale`; nodes of them are kept.

        Raises:
            Refusal: it has no canonical form.
        """
        ...

    def open_export(self, path: Path, config: DecoderConfig, shape: GraphShape) -> PartRunner:
        """Run an export itself under the names and shapes of the canonical graph."""
        ...

    def is_coarse(self, model: ir.Model) -> bool:
        """Return whether an export computes in less than float32."""
        ...


def find_export_reader(path: Path) -> ExportReader:
    """Return the reader that is installed.

    Raises:
        ModelFileError: there is none; names the export.
    """
    for name in entry_names(DOOR):
        return cast("ExportReader", load_entry(DOOR, name))
    reason = f"nothing that is installed reads ONNX of other tools (entry point {PREFIX}{DOOR})"
    raise ModelFileError(path, reason)


def reader_modules() -> tuple[str, ...]:
    """Return the modules whose code decides how exports are read."""
    return entry_modules(DOOR, entry_names(DOOR))


class ImportModel(Pass):
    """Brings an export into canonical form, by the reader that is installed.

    A model in canonical form is only brought to the shape.

    Attributes:
        shape: target shape; None keeps the export's own.
        operations: of op packages, as `my.package::Scale`; nodes of them are kept.
        fixed_keep_theirs: the shape applies to exports with symbolic sizes only.
        rope: after a run, the rotary embedding that the source computes itself.
        takes_rotations: after a run, whether a source in another form takes it from its host.
    """

    name = "import"
    sorts_nodes = True  # some tools append inserted nodes, and ONNX Runtime accepts any order
    requires = (SORTED,)
    ensures = (SORTED, STATIC)

    def __init__(
        self,
        shape: GraphShape | None = None,
        *,
        fixed_keep_theirs: bool = False,
        operations: Collection[str] = (),
    ) -> None:
        self.shape = shape
        self.operations = operations
        self.fixed_keep_theirs = fixed_keep_theirs
        self.rope: RopeTables | None = None
        self.takes_rotations = False
        self._path = Path()

    def run(self, source: Path, target: Path) -> Path:
        """See `Pass.run`."""
        self._path = source
        return super().run(source, target)

    def transform(self, model: ir.Model) -> ir.Model:
        """Return a new model, or `model` itself if it is canonical."""
        if is_canonical(model):
            own = interface.model_shape(model)
            if self.shape is None or self.fixed_keep_theirs or self.shape == own:
                return model
            return ArClConversion(self.shape).transform(model)
        try:
            export = find_export_reader(self._path).read_export(
                model, self.shape, keeps_fixed=self.fixed_keep_theirs, operations=self.operations
            )
        except Refusal as refusal:
            raise _unsupported_error(self._path, model, refusal) from refusal
        self.rope, self.takes_rotations = export.rope, export.takes_rotations
        return export.model


def is_canonical(model: ir.Model) -> bool:
    """Return whether a model has the canonical interface, and no (AR, CL) in its operators."""
    inputs = {str(value.name): static_shape(value) for value in model.graph.inputs}
    names = set(inputs)
    needed = {interface.ATTENTION_MASK, interface.past_key(0, "in"), interface.past_value(0, "in")}
    mask = inputs.get(interface.ATTENTION_MASK)
    if not needed <= names or mask is None or len(mask) != 4:
        return False
    if model.opset_imports.get("") != OPSET or mask[:2] != (1, 1):
        return False
    return all(_is_canonical(node) for node in model.graph)


def _is_canonical(node: ir.Node) -> bool:
    attributes = _OPERATORS.get(node.op_type)
    if attributes is None or not set(node.attributes) <= set(attributes):
        return False
    for name, values in attributes.items():
        attribute = node.attributes.get(name)
        if attribute is not None and values and attribute.value not in values:
            return False
    match node.op_type:
        case "Add":  # masked scores go through a softmax, else the mask hides nothing
            is_mask = any(v is not None and v.name == interface.ATTENTION_MASK for v in node.inputs)
            users = node.outputs[0].consumers()
            return not is_mask or all(user.op_type == "Softmax" for user in users)
        case "Cast":  # of weights that are kept in another type
            return all(value is not None and value.is_initializer() for value in node.inputs)
        case "MatMul":
            return not any(map(_is_weight, node.inputs))
        case "Gemm" | "LayerNormalization" | "RMSNormalization":
            return [_is_weight(value) for value in node.inputs[:2]] == [False, True]
        case "Gather":
            return [_is_weight(value) for value in node.inputs] == [True, False]
        case "Concat":  # the past comes first
            return not any(v is not None and v.is_graph_input() for v in node.inputs[1:])
        case "Reshape":
            to = node.inputs[1] if len(node.inputs) > 1 else None
            target = to.const_value if to is not None else None
            return target is not None and -1 in tensor_array(target)
    return True


def _is_weight(value: ir.Value | None) -> bool:
    """Return whether a value is stored in the file, possibly in another type than it is used in."""
    if value is None:
        return False
    maker = value.producer()
    if maker is not None and maker.op_type == "Cast":
        value = maker.inputs[0]
    return value is not None and value.is_initializer()


def _unsupported_error(path: Path, model: ir.Model, refusal: Refusal) -> ModelFileError:
    node = refusal.node
    if node is None:
        return ModelFileError(path, refusal.reason)
    count = Counter(other.op_type for other in model.graph)[node.op_type]
    where = f"{node.op_type} {node.name!r} ({count} of this operator)"
    return ModelFileError(path, f"{where} {refusal.reason}")


def check_rotation(importing: ImportModel, config: DecoderConfig, path: Path) -> None:
    """Compare the rotary embedding of an imported source with the one that hosts will feed.

    Args:
        importing: after its run.
        config: configuration that hosts compute theirs from.
        path: path of the configuration, for messages.
    """
    length = rotation_length(config)
    if importing.takes_rotations and length != 1.0:
        reason = (
            f"rope_scaling makes cosines {length:.4g} times as long, and the ONNX takes them from "
            "its host, which feeds none longer than 1; export it with its own"
        )
        raise ModelFileError(path, reason)
    rope = importing.rope
    if rope is None:
        return
    count, width = rope.cos.shape
    tables = [table[rope.first :] for table in rope_tables(config, rope.first + count)]
    if tables[0].shape[1] != width:
        reason = f"heads turn {2 * width} dimensions in the ONNX, and {config.rotary_dim} by it"
        raise ModelFileError(path, reason)
    worst = max(
        float(np.abs(own - ours).max())
        for own, ours in zip((rope.cos, rope.sin), tables, strict=True)
    )
    if not worst <= max(_TOLERANCE, rope.tolerance):
        reason = (
            "rotary positions of the ONNX are others than rope_theta and rope_scaling give "
            f"(cosines differ by up to {worst:.2g})"
        )
        raise ModelFileError(path, reason)
