"""`qnnfarm profile`: cost by operator of one container, or of two side by side."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from buildlib.container.container import GenAIContainer
from buildlib.paths import default_cache_root
from buildlib.toolchains.base import NodeCycles
from harness.cli.arguments import CacheDir, ContainerDir, DeviceOptions, Json, with_groups
from harness.cli.device_lease import open_session
from harness.console import answers, print_json, print_remark, print_rows
from harness.runtimes.registry import open_model
from plugins.diagnosis.graph_runtime import GraphRuntime
from plugins.diagnosis.operator_costs import (
    Costs,
    OperatorCost,
    emulator_cycles,
    operator_costs,
    total_by_kind,
    total_by_layer,
)

_LABEL = "{cycles}; nodes, bytes and the loss of weights (SQNR) are the container's"
_EMULATOR = "cycles of the HTP emulator, the least of {n}: they say nothing about hardware"
_DEVICE = "cycles of {device}, by QNN's detailed profile, the least of {n}"


@with_groups
def profile(
    container_dir: ContainerDir,
    other_dir: Annotated[
        Path | None, typer.Argument(help="Folder of another container, to stand beside it.")
    ] = None,
    *,
    by: Annotated[
        Literal["operator", "kind", "layer"],
        typer.Option(help="A row for each operator, for the same one of all layers, or a layer."),
    ] = "operator",
    top: Annotated[int, typer.Option(min=1, help="Rows of each graph, those of most cycles.")] = 20,
    repetitions: Annotated[int, typer.Option(min=1, max=100, help="Runs of each graph.")] = 3,
    options: DeviceOptions,
    cache: CacheDir = None,
    json: Json = False,
) -> None:
    """Show the cost of each operator: compiled nodes, cycles, bytes, loss of weights.

    Operators of one name stand on one line, also those of two containers. Cycles are those of a
    device that is named, by the runtime graph; else of the emulator on this host, for which a
    phone's container is compiled again, as `rehearse` does it.

    Example: qnnfarm profile CONTAINER_DIR --by layer
    """
    folders = [container_dir, *([other_dir] if other_dir else [])]
    grouping: Mapping[str, Callable[[Costs], Costs]] = {
        "operator": lambda costs: costs,
        "kind": total_by_kind,
        "layer": total_by_layer,
    }
    tables: list[dict[str, Costs]] = []
    root, source = cache or default_cache_root(), _EMULATOR.format(n=repetitions)
    for folder in folders:
        container = GenAIContainer.load(folder)
        if options.device or options.pool:
            cycles, source = _device_cycles(folder, options, repetitions)
        else:
            print_remark(f"profiling {folder} on the emulator")
            cycles = emulator_cycles(container, cache_root=root, repetitions=repetitions)
        costs, reason = operator_costs(container, cycles, cache_root=root)
        if reason:
            print_remark(f"weights are not counted: {reason}")
        tables.append({graph: grouping[by](table) for graph, table in costs.items()})
    label = _LABEL.format(cycles=source)
    if json:
        print_json(
            {
                "measured": label,
                "containers": [
                    {
                        "container": str(folder),
                        "graphs": {g: _values(costs) for g, costs in table.items()},
                    }
                    for folder, table in zip(folders, tables, strict=True)
                ],
            }
        )
        return
    graphs = dict.fromkeys(graph for table in tables for graph in table)
    for graph in graphs:
        _print(graph, [table.get(graph, {}) for table in tables], top)
    answers().print(f"\n{label}")


def _device_cycles(
    folder: Path, options: DeviceOptions, repetitions: int
) -> tuple[NodeCycles, str]:
    """Return cycles that a device measured, and their source in words."""
    model = open_model(folder, "graph")
    with open_session(model, options, command="profile") as session:
        runtime = session.runtime
        assert isinstance(runtime, GraphRuntime)  # noqa: S101  (the model's)
        cycles = runtime.node_cycles(repetitions)
        if session.properties.emulator:
            return cycles, _EMULATOR.format(n=repetitions)
        return cycles, _DEVICE.format(device=session.device_label, n=repetitions)


def _values(costs: Costs) -> dict[str, object]:
    return {
        name: {
            "nodes": cost.nodes,
            "cycles": cost.cycles,
            "weight_bytes": cost.weight_bytes,
            "weight_sqnr_db": None if _lossless(cost) else cost.sqnr_db,
        }
        for name, cost in costs.items()
    }


def _lossless(cost: OperatorCost) -> bool:
    return cost.sqnr_db is not None and math.isinf(cost.sqnr_db)


def _print(graph: str, tables: list[Costs], top: int) -> None:
    """Print one graph of all containers; two have their columns beside each other."""
    console = answers()
    totals = [sum(cost.cycles for cost in table.values()) for table in tables]
    names = sorted(
        dict.fromkeys(name for table in tables for name in table),
        key=lambda name: -max(table[name].cycles for table in tables if name in table),
    )
    sides = [""] if len(tables) == 1 else [" A", " B"]
    headings = [f"{what}{side}" for what in ("nodes", "kcycles", "%", "kB", "dB") for side in sides]
    rows = []
    for name in names[:top]:
        costs = [table.get(name) for table in tables]
        cells = [name]
        for number in _COLUMNS:
            for cost, total in zip(costs, totals, strict=True):
                cells.append("" if cost is None else number(cost, total))
        rows.append(cells)
    console.print(f"\n{graph}", style="bold")
    print_rows(("operator", *headings), rows)
    rest = names[top:]
    if rest:
        console.print(f"and {len(rest)} more rows: --top {len(names)}")


def _loss(cost: OperatorCost, _total: int) -> str:
    if cost.sqnr_db is None:
        return ""
    return "equal" if _lossless(cost) else f"{cost.sqnr_db:.1f}"


_COLUMNS: tuple[Callable[[OperatorCost, int], str], ...] = (
    lambda cost, _: str(cost.nodes),
    lambda cost, _: f"{cost.cycles / 1e3:,.1f}",
    lambda cost, total: f"{100 * cost.cycles / total:.1f}" if total else "",
    lambda cost, _: f"{cost.weight_bytes / 1e3:,.1f}" if cost.weight_bytes else "",
    _loss,
)
