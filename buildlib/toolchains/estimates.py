"""Peak memory of a toolchain's child processes, so that builds run as many at once as fit.

Measured with QNN 2.51 on decoder layers and output heads of Llama-3.2-1B's shape, W8A16: the
compiler keeps about twice the weights of every graph, and the binary in nearly four copies while it
writes it.
"""

_BASE = 250 << 20
_GRAPH_COPIES = 2.15
_BINARY_COPIES = 3.8


def compile_memory_of_weights(weight_bytes: int, n_graphs: int, *, weight_sharing: bool) -> int:
    """Bytes that compiling graphs of equal weights into one binary takes.

    Args:
        weight_bytes: of one graph.
    """
    copies = _GRAPH_COPIES * n_graphs + _BINARY_COPIES * (1 if weight_sharing else n_graphs)
    return 2 * _BASE + int(copies * weight_bytes)
