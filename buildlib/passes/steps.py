"""Cut of a model, such as one decoder layer, into steps that end with values of given names."""

from collections.abc import Sequence

import onnx_ir as ir

from buildlib.passes.split import extract_nodes


def cut_into_steps(model: ir.Model, names: Sequence[str]) -> list[ir.Model]:
    """Return models that compute a model one after the other, one more than names.

    Each computes the value of the next name, the last one the rest. Its outputs are that value,
    those that a later step reads, and its share of the outputs of the model. A step that has
    nothing to compute has no nodes.

    Args:
        model: stays as it is; constants are copied by reference.
        names: of values in it, in the order of the data flow.
    """
    graph = model.graph
    values = {str(value.name): value for node in graph for value in node.outputs}
    varying = _varying(graph)
    members: list[set[ir.Node]] = []
    rest = set(varying)
    for name in names:
        members.append(_ancestors(values[name], rest) if name in values else set())
        rest -= members[-1]
    members.append(rest)
    return [
        _step(model, own, members[number + 1 :], set(names), _constant_nodes(own, varying))
        for number, own in enumerate(members)
    ]


def _step(
    model: ir.Model,
    own: set[ir.Node],
    later: Sequence[set[ir.Node]],
    names: set[str],
    constants: set[ir.Node],
) -> ir.Model:
    graph = model.graph
    read_later = {value for nodes in later for node in nodes for value in node.inputs}
    read_later.update(graph.outputs)
    own_values = [value for node in graph if node in own for value in node.outputs]
    outputs = [value for value in own_values if value in read_later or value.name in names]
    nodes = [node for node in graph if node in own | constants]
    inside = {value for node in nodes for value in node.outputs} | set(graph.initializers.values())
    operands = [value for node in nodes for value in node.inputs if value is not None]
    inputs = dict.fromkeys(value for value in operands if value not in inside)
    return extract_nodes(model, nodes, list(inputs), outputs)


def _varying(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that depend on an input."""
    values = set(graph.inputs) - set(graph.initializers.values())
    nodes = set()
    for node in graph:
        if any(value in values for value in node.inputs):
            nodes.add(node)
            values.update(node.outputs)
    return nodes


def _ancestors(value: ir.Value, among: set[ir.Node]) -> set[ir.Node]:
    ancestors: set[ir.Node] = set()
    todo = [value]
    while todo:
        node = todo.pop().producer()
        if node in among and node not in ancestors:
            ancestors.add(node)
            todo += [each for each in node.inputs if each is not None]
    return ancestors


def _constant_nodes(nodes: set[ir.Node], varying: set[ir.Node]) -> set[ir.Node]:
    """Return the nodes that need no input and that others need, such as casts of weights."""
    makers: set[ir.Node] = set()
    todo = [value for node in nodes for value in node.inputs if value is not None]
    while todo:
        maker = todo.pop().producer()
        if maker is not None and maker not in varying and maker not in makers:
            makers.add(maker)
            todo += [value for value in maker.inputs if value is not None]
    return makers
