"""What a log says of a model that was refused."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from buildlib.errors import ToolchainError, UnsupportedOperatorsError

_UNSUPPORTED = re.compile(r"Unsupported nodes in QNN EP: (.*)")
_NODE = re.compile(r"\{ name: (.*?), type: (\S+) \}")
_MAX_LOG_BYTES = 64 * 1024 * 1024
_MAX_KINDS = 5


def diagnosed(error: ToolchainError) -> ToolchainError:
    """The same error, or one that names the operators that the tensor processor does not have."""
    nodes = unsupported_nodes(Path(error.log_path))
    if not nodes:
        return error
    return UnsupportedOperatorsError(
        error.step,
        error.subject,
        _summary(nodes),
        error.exit_status,
        error.log_tail,
        error.log_path,
        nodes,
    )


def unsupported_nodes(log: Path) -> tuple[tuple[str, str], ...]:
    """Name and operator of every node that ONNX Runtime's QNN provider did not take, once each."""
    try:
        with log.open("rb") as file:
            text = file.read(_MAX_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ()
    lists = _UNSUPPORTED.findall(text)
    return tuple(dict.fromkeys(node for found in lists for node in _NODE.findall(found)))


def _summary(nodes: Sequence[tuple[str, str]]) -> str:
    """`2 operators are not supported: Shrink (2, first act_1)`."""
    first = {operator: name for name, operator in reversed(nodes)}
    counts = Counter(operator for _name, operator in nodes).most_common()
    kinds = [f"{kind} ({count}, first {first[kind]})" for kind, count in counts[:_MAX_KINDS]]
    if len(counts) > _MAX_KINDS:
        kinds.append(f"{len(counts) - _MAX_KINDS} more kinds")
    verb = "operator is" if len(nodes) == 1 else "operators are"
    return f"{len(nodes)} {verb} not supported: {', '.join(kinds)}"
