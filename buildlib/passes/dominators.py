"""Which values every path through a graph must pass."""

import onnx_ir as ir


def dominator_chain(source: ir.Value, sink: ir.Value) -> list[ir.Value]:
    """The values on all paths from `source` to `sink`, in order, both included.

    Other inputs (masks, caches, constants) do not count as paths: only what depends on `source`.
    Cooper, Harvey, Kennedy, "A Simple, Fast Dominance Algorithm", on a graph without cycles.
    """
    parent: dict[ir.Value, ir.Value] = {source: source}
    depth = {source: 0}
    graph = source.graph
    assert graph is not None  # noqa: S101  (a value of a graph)
    for node in graph:
        reached = [value for value in node.inputs if value in parent]
        if not reached:
            continue
        meeting = reached[0]
        assert meeting is not None  # noqa: S101  (membership was tested)
        for other in reached[1:]:
            meeting = _meet(meeting, other, parent, depth)
        for output in node.outputs:
            parent[output] = meeting
            depth[output] = depth[meeting] + 1
    if sink not in parent:
        return []
    chain = [sink]
    while chain[-1] is not source:
        chain.append(parent[chain[-1]])
    return chain[::-1]


def _meet(
    first: ir.Value,
    second: ir.Value | None,
    parent: dict[ir.Value, ir.Value],
    depth: dict[ir.Value, int],
) -> ir.Value:
    assert second is not None  # noqa: S101  (membership was tested)
    while first is not second:
        if depth[first] < depth[second]:
            first, second = second, first
        first = parent[first]
    return first
