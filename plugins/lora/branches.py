"""Low-rank branches: y = x W becomes y = x W + alpha (x A) B, with A, B, alpha as inputs.

Genie fills every input with `lora` in its name from the active adapter, and the one called by
`alpha-tensor-name` with its strength.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from buildlib.encodings.attachment import inherit
from buildlib.graph import interface
from buildlib.passes.base import SORTED, STATIC, Condition, Pass
from plugins.lora.peft import Module
from plugins.lora.projections import Projection, find_projections


def a_name(module: Module) -> str:
    """Return the input that takes A [in, rank]."""
    return f"lora_a_{module.layer}_{module.name}"


def b_name(module: Module) -> str:
    """Return the input that takes B [rank, out]."""
    return f"lora_b_{module.layer}_{module.name}"


@dataclass(frozen=True)
class Branch:
    """Branch of one module."""

    module: Module
    projection: Projection
    rank: int


class LoraBranches(Pass):
    """Adds a branch to each module of `branches`, which it finds in the transformed model.

    The product keeps its name and place in the graph under a new sum, which has the encoding that
    the product had; the branch itself has none until it is calibrated.
    """

    name = "lora"

    def __init__(self, branches: Sequence[Branch], alpha_name: str) -> None:
        self.branches = tuple(branches)
        self.alpha_name = alpha_name
        self.requires = (
            SORTED,
            STATIC,
            Condition("it has no adapters yet", self._present),
            Condition("it has every module that an adapter changes", self._missing),
        )
        self.ensures = (SORTED, STATIC)

    def transform(self, model: ir.Model) -> ir.Model:
        """Change `model` in place."""
        graph = model.graph
        projections = find_projections(model)
        alpha = _input(self.alpha_name, (1,))
        for branch in self.branches:
            module = branch.module
            projection = projections[module.layer][module.name]
            a = _input(a_name(module), (projection.n_in, branch.rank))
            b = _input(b_name(module), (branch.rank, projection.n_out))
            graph.inputs.extend((a, b))
            _add(graph, projection, (a, b, alpha), str(module).replace(" of layer ", "_"))
        graph.inputs.append(alpha)
        return model

    def _present(self, model: ir.Model) -> str | None:
        names = [
            str(value.name) for value in model.graph.inputs if interface.LORA in str(value.name)
        ]
        return f"it takes {names[0]}" if names else None

    def _missing(self, model: ir.Model) -> str | None:
        projections = find_projections(model)
        for branch in self.branches:
            if branch.module.name not in projections.get(branch.module.layer, {}):
                return f"{branch.module} is not found"
        return None


def _add(
    graph: ir.Graph,
    projection: Projection,
    inputs: tuple[ir.Value, ir.Value, ir.Value],
    stem: str,
) -> None:
    a, b, alpha = inputs
    output, uses = projection.output, list(projection.output.uses())
    name = f"lora_{stem}"
    down = _node("MatMul", [projection.input, a], f"{name}_down")
    up = _node("MatMul", [down.outputs[0], b], f"{name}_up")
    scaled = _node("Mul", [up.outputs[0], alpha], f"{name}_scaled")
    total = _node("Add", [output, scaled.outputs[0]], f"{name}_sum")
    graph.insert_after(projection.node, [down, up, scaled, total])
    inherit(total.outputs[0], output)
    for use in uses:
        use.node.replace_input_with(use.idx, total.outputs[0])


def _node(op_type: str, inputs: list[ir.Value], name: str) -> ir.Node:
    output = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))
    return ir.node(op_type, inputs, outputs=[output], name=name)


def _input(name: str, dims: tuple[int, ...]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(dims))
