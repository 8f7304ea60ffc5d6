"""What measurements look like at the end of a session: llama-bench's markdown table."""

from collections.abc import Mapping, Sequence

from harness.results.metrics import find_metric
from harness.results.stats import summarise

_GIB, _MIB, _GIGA = 2.0**30, 2.0**20, 1e9
_COLUMNS = ("model", "size", "params", "backend", "device", "test")
_LEFT = {"model", "backend", "device"}

Row = Mapping[str, object]


def table(rows: Sequence[Row]) -> list[str]:
    """The lines, one for each container, backend, device and test; speeds are in tokens/s.

    Values of the same cell are put together by session, as with `--repeat`.
    """
    lines = []
    rates = [row for row in rows if str(row["metric"]).endswith("_tokens_per_s")]
    others = [row for row in rows if not str(row["metric"]).endswith("_tokens_per_s")]
    several = _ambiguous(rows)
    if rates:
        cells = [(*_cells(row, several), _spread(sessions)) for row, sessions in _merge(rates)]
        lines += _markdown(cells)
    if any(row.get("emulator") for row in rates):
        lines.append("measured on the HTP emulator: its speed says nothing about hardware speed")
    for row, sessions in _merge(others):
        metric = find_metric(str(row["metric"]))
        told = _spread(sessions, metric.scale, metric.decimals)
        where = " on ".join(filter(None, (_model(row, several), str(row.get("device") or ""))))
        test = f"{row['test']} of {where}" if where else row["test"]
        lines.append(f"{test}: {metric.label} {told} {metric.shown_unit}".rstrip())
    return lines


def _merge(rows: Sequence[Row]) -> list[tuple[Row, list[list[float]]]]:
    """The first row of each cell, with the values of each of its sessions."""
    merged: dict[tuple[object, ...], tuple[Row, dict[object, list[float]]]] = {}
    for row in rows:
        names = ("model", "container", "backend", "device", "test", "metric")
        _, sessions = merged.setdefault(tuple(row.get(name) for name in names), (row, {}))
        values = [value for value in _sequence(row["values"]) if isinstance(value, float)]
        sessions.setdefault(row.get("session"), []).extend(values)
    return [(row, list(sessions.values())) for row, sessions in merged.values()]


def _ambiguous(rows: Sequence[Row]) -> frozenset[object]:
    """The models of which there is more than one container."""
    containers: dict[object, set[object]] = {}
    for row in rows:
        containers.setdefault(row.get("model"), set()).add(row.get("container"))
    return frozenset(model for model, found in containers.items() if len(found) > 1)


def _model(row: Row, several: frozenset[object]) -> str:
    model = str(row.get("model") or "")
    return f"{model} {str(row.get('container'))[:12]}" if row.get("model") in several else model


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []


def _cells(row: Row, several: frozenset[object]) -> tuple[str, ...]:
    device = " ".join(str(row.get(key) or "") for key in ("soc", "device")).strip()
    return (
        _model(row, several),
        _bytes(row.get("size")),
        _count(row.get("params")),
        str(row.get("backend") or ""),
        device,
        str(row["test"]),
    )


def _bytes(size: object) -> str:
    if not isinstance(size, int):
        return "?"
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.2f} MiB"


def _count(params: object) -> str:
    if not isinstance(params, int):
        return "?"
    return f"{params / _GIGA:.2f} B" if params >= _GIGA else f"{params / 1e6:.2f} M"


def _spread(sessions: Sequence[Sequence[float]], scale: float = 1.0, decimals: int = 2) -> str:
    """Mean and standard deviation, as reports have them; the spread of one value is unknown."""
    stats = summarise(sessions)
    if stats is None:
        return ""
    mean = f"{stats.mean * scale:.{decimals}f}"
    return mean if stats.sd is None else f"{mean} ± {stats.sd * scale:.{decimals}f}"


def _markdown(cells: Sequence[tuple[str, ...]]) -> list[str]:
    names = (*_COLUMNS, "t/s")
    clean = [tuple(cell.replace("|", "/") for cell in row) for row in cells]
    widths = [max(map(len, column)) for column in zip(names, *clean, strict=True)]
    left = [name in _LEFT for name in names]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * (width + 2) if is_left else "-" * (width + 1) + ":"
        for width, is_left in zip(widths, left, strict=True)
    ]
    return [line(names), f"|{'|'.join(rule)}|", *map(line, clean)]
