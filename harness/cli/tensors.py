"""Tensors and facts on a terminal; similar tensors share a line."""

import re
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from buildlib.container.container import GenAIContainer
from buildlib.errors import ToolchainMissingError
from buildlib.toolchains.base import BinaryInfo, TensorInfo
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from harness.console import print_remark, print_rows

_NUMBER = re.compile(r"\d+")


def print_facts(console: Console, facts: Mapping[str, object]) -> None:
    """Print names and values in two columns, without empty values."""
    texts = {name: _text(value) for name, value in facts.items() if value not in ("", None)}
    width = max(map(len, texts), default=0)
    for name, text in texts.items():
        console.print(Text(name.ljust(width), "bold").append(f"  {text}", "not bold"))


def print_tensors(
    console: Console,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    *,
    every: bool,
) -> None:
    """Print a line for each tensor, or for tensors whose names differ in one number only."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("tensor", overflow="fold")
    for heading in ("shape", "type", "scale", "offset"):
        table.add_column(heading, no_wrap=True)
    for kind, tensors in (("    in", inputs), ("    out", outputs)):
        for group in [[t] for t in tensors] if every else alike(tensors):
            encodings = [tensor.encoding for tensor in group if tensor.encoding]
            table.add_row(
                kind,
                common_name([tensor.name for tensor in group]),
                "x".join(map(str, group[0].shape)),
                group[0].dtype,
                _span(f"{encoding.scale:.4g}" for encoding in encodings),
                _span(str(encoding.offset) for encoding in encodings),
            )
    console.print(table)


def read_binaries(container: GenAIContainer) -> dict[str, BinaryInfo]:
    """Read the context binaries of a container; none where this machine lacks the compiler."""
    try:
        return {name: OrtQnnToolchain().inspect(p) for name, p in container.binaries.items()}
    except ToolchainMissingError as error:
        print_remark(f"the binaries are not read: {error}")
        return {}


def alike(tensors: Sequence[TensorInfo]) -> list[list[TensorInfo]]:
    """Group tensors of equal shape and type whose names differ in their first number only."""
    groups: dict[tuple[str, tuple[int, ...], str], list[TensorInfo]] = {}
    for tensor in tensors:
        pattern = _NUMBER.sub("*", tensor.name, count=1)
        groups.setdefault((pattern, tensor.shape, tensor.dtype), []).append(tensor)
    return list(groups.values())


def common_name(names: Sequence[str]) -> str:
    """Name a group: `past_key_{0..15}_in`."""
    numbers = [int(match[0]) for name in names if (match := _NUMBER.search(name))]
    if len(names) == 1:
        return names[0]
    first, last = min(numbers), max(numbers)
    whole = last - first + 1 == len(numbers) == len(set(numbers))
    numbers_text = f"{first}..{last}" if whole else ",".join(map(str, sorted(numbers)))
    return _NUMBER.sub(f"{{{numbers_text}}}", names[0], count=1)


def _span(texts: Iterable[str]) -> str:
    values = sorted(set(texts), key=float)
    return " .. ".join(dict.fromkeys((values[0], values[-1]))) if values else ""


def _text(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value))
    return str(value)


def print_shapes(infos: list[TensorInfo], *, every: bool) -> None:
    """Print names, shapes and types of a file's tensors, equal ones in one line."""
    rows = [
        [common_name([t.name for t in group]), "x".join(map(str, group[0].shape)), group[0].dtype]
        for group in ([[info] for info in infos] if every else alike(infos))
    ]
    print_rows(("tensor", "shape", "type"), rows)
