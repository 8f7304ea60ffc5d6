"""Figures: a table of values, and how a chart shows it.

A figure is its table. The chart is drawn from that table in the browser, the table is what a screen
reader and a browser without scripts get, and its CSV and markdown are what a reader copies. The
charts are Vega-Lite specifications (https://vega.github.io/vega-lite/docs/): plain JSON, to which
`report.js` adds the table's rows as data.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from harness.console import visible
from harness.words import NO_VALUE, csv_cell
from reports.text import short_time

Value = str | float | datetime | None
Spec = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a figure.

    Attributes:
        key: its name in the chart and in CSV, with the unit: `decode_tokens_per_s`.
        label: its heading, as people read it.
        decimals: of shown numbers; CSV has all digits.
    """

    key: str
    label: str
    kind: Literal["text", "number", "time"] = "text"
    decimals: int = 2

    def show(self, value: Value) -> str:
        """Format one value for people."""
        if value is None:
            return NO_VALUE
        if isinstance(value, datetime):
            return short_time(value)
        if isinstance(value, str):
            return visible(value)
        size = abs(value)
        decimals = max(self.decimals - (size >= 100) - (size >= 1000), 0)
        return f"{value:,.{decimals}f}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A table of values and its chart.

    Attributes:
        id: for anchors, and for `qnnfarm report --figure`.
        title: also the chart's accessible name.
        about: the reading of the chart in one sentence.
        rows: one value for each column; what comes from outside is made visible when shown.
        spec: the chart without its data; empty for a table that no chart shows.
        samples: rows of a chart that are too many for a table; `rows` then sums them up.
        notes: remarks on the values, a line each.
    """

    id: str
    title: str
    about: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    spec: Spec = field(default_factory=dict)
    samples: "Samples | None" = None
    notes: tuple[str, ...] = ()

    def to_csv(self) -> str:
        """Format as CSV (RFC 4180) with the columns' keys as header."""
        if self.samples is not None:
            return self.samples.to_csv()
        return _to_csv([column.key for column in self.columns], self.rows)

    def to_markdown(self) -> str:
        """Format as a table of GitHub Flavored Markdown."""
        heading = [column.label for column in self.columns]
        rule = ["---" if column.kind == "text" else "---:" for column in self.columns]
        texts = (
            [column.show(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        )
        return "\n".join(_markdown_row(row) for row in (heading, rule, *texts)) + "\n"


@dataclass(frozen=True, slots=True)
class Samples:
    """Many rows of numbers, such as a run's telemetry."""

    keys: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]

    def to_csv(self) -> str:
        """Format as CSV (RFC 4180)."""
        return _to_csv(self.keys, self.rows)


def _to_csv(keys: Sequence[str], rows: Sequence[Sequence[Value]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([visible(key) for key in keys])
    writer.writerows([_csv_value(value) for value in row] for row in rows)
    return out.getvalue()


def _csv_value(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat()
    return visible(str(csv_cell(value))) if isinstance(value, str) else f"{value:.10g}"


def raw(value: Value) -> str | None:
    """Return a value with all its digits for the chart; None if the shown text is the same."""
    if isinstance(value, datetime):
        return value.isoformat(timespec="minutes")
    if isinstance(value, str) or value is None or not math.isfinite(value):
        return None
    return f"{value:.10g}"


def _markdown_row(cells: Sequence[str]) -> str:
    plain = (" ".join(cell.replace("|", "\\|").split()) for cell in cells)
    return f"| {' | '.join(plain)} |"


# Parts of Vega-Lite specifications.

_TICKS = 6
"""Of times on an axis: more would put hours between the days of a week."""
_TICK = (
    "utcFormat(datum.value, "
    "utchours(datum.value) || utcminutes(datum.value) ? '%H:%M' : '%Y-%m-%d')"
)


def quantity(key: str, title: str, *, zero: bool = False, **more: object) -> dict[str, object]:
    """Encode a number on an axis."""
    scale: dict[str, object] = {"zero": zero, "nice": True}
    scale |= dict(more.pop("scale", None) or {})  # type: ignore[call-overload]
    return {"field": key, "type": "quantitative", "title": title, "scale": scale, **more}


def moment(key: str, title: str | None = None, **more: object) -> dict[str, object]:
    """Encode a time on an axis, in UTC: its ticks are days, and times between them."""
    scale = {"type": "utc", "padding": 8}
    axis = {
        "labelExpr": _TICK, "labelOverlap": "greedy", "labelFlush": True, "labelSeparation": 12,
        "tickCount": _TICKS,
    } | dict(more.pop("axis", None) or {})  # type: ignore[call-overload]  # fmt: skip
    return {"field": key, "type": "temporal", "title": title, "scale": scale, "axis": axis, **more}


def shade(field: str, columns: int = 1, **more: object) -> dict[str, object]:
    """Encode a text by colours, with their legend below."""
    legend = {"orient": "bottom", "columns": columns, "labelLimit": 600}
    return {"field": field, "type": "nominal", "title": None, "legend": legend, **more}


def lanes(parts: Iterable[Spec], **scales: str) -> Spec:
    """Draw one above the other, over one axis.

    Args:
        scales: further ones that are shared, or independent.
    """
    resolve = {"scale": {"x": "shared", **scales}}
    return {"vconcat": list(parts), "spacing": 8, "resolve": resolve}


def tooltips(columns: Sequence[Column]) -> list[dict[str, object]]:
    """Show these columns of the mark under the pointer."""
    kinds = {"text": "nominal", "number": "quantitative", "time": "temporal"}
    encodings: list[dict[str, object]] = []
    for column in columns:
        one: dict[str, object] = {
            "field": column.key,
            "type": kinds[column.kind],
            "title": visible(column.label),
        }
        if column.kind == "number":
            one["format"] = ",.4~g" if column.decimals else ",.0f"
        elif column.kind == "time":
            one |= {"format": "%Y-%m-%d %H:%M", "timeUnit": "utcyearmonthdatehoursminutes"}
        encodings.append(one)
    return encodings
