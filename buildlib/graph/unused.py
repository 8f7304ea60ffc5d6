"""What no output of a graph depends on any more."""

import onnx_ir as ir


def remove_unused(graph: ir.Graph) -> None:
    """Drop every node and initializer that nothing uses, in place."""
    for node in reversed(list(graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
            graph.remove(node)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
