"""Extraction of the embedding table: `input_ids` becomes `inputs_embeds` [1, AR, hidden]."""

import onnx_ir as ir

from buildlib.encodings.attachment import encoding_of, inherit
from buildlib.graph import interface
from buildlib.graph.values import (
    is_parameter,
    operand,
    remove_unused,
    source_of,
    static_shape,
)
from buildlib.passes.base import SORTED, STATIC, Condition, Pass


def _fault(model: ir.Model) -> str | None:
    names = [value.name for value in model.graph.inputs]
    if interface.INPUT_IDS not in names:
        return f"there is no {interface.INPUT_IDS}; inputs are {', '.join(map(str, names[:4]))}"
    if find_lookup(model) is None:
        return f"{interface.INPUT_IDS} goes elsewhere than into one Gather of a constant table"
    return None


def _remaining_ids(model: ir.Model) -> str | None:
    return f"{interface.INPUT_IDS} is" if _ids(model) is not None else None


class EmbeddingExtraction(Pass):
    """Replaces the lookup by an input that takes its result.

    The table stays in the model only where something else uses it, as a tied output projection.
    The input has the encoding of the lookup's result, or else of the table.
    """

    name = "embedding"
    requires = (SORTED, STATIC, Condition("tokens are looked up in one table", _fault))
    ensures = (SORTED, STATIC, Condition("no token ids are left", _remaining_ids))

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        graph = model.graph
        lookup, ids = find_lookup(model), _ids(model)
        assert lookup is not None and ids is not None  # noqa: S101, PT018  (a precondition)
        old, table = lookup.outputs[0], table_of(lookup)
        dims = (*(static_shape(ids) or ()), (static_shape(table) or ())[-1])
        real = ir.TensorType(ir.DataType.FLOAT)
        embeds = ir.Value(name=interface.INPUTS_EMBEDS, type=real, shape=ir.Shape(dims))
        inherit(embeds, old if encoding_of(old) else table)
        old.replace_all_uses_with(embeds)
        graph.inputs[graph.inputs.index(ids)] = embeds
        remove_unused(graph)
        return model


def find_lookup(model: ir.Model) -> ir.Node | None:
    """Return the Gather that makes hidden states of `input_ids`, if it is their only use."""
    ids = _ids(model)
    if ids is None:
        return None
    uses = list(ids.uses())
    while len(uses) == 1 and uses[0].node.op_type == "Cast":
        uses = list(uses[0].node.outputs[0].uses())
    if len(uses) != 1 or uses[0].idx != 1:
        return None
    node = uses[0].node
    data = node.inputs[0]
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0 or data is None:
        return None
    shape = static_shape(source_of(data))
    return node if is_parameter(data) and shape is not None and len(shape) == 2 else None


def table_of(lookup: ir.Node) -> ir.Value:
    """Return the stored table [vocab, hidden] of a lookup."""
    return source_of(operand(lookup, 0))


def _ids(model: ir.Model) -> ir.Value | None:
    return next((v for v in model.graph.inputs if v.name == interface.INPUT_IDS), None)
