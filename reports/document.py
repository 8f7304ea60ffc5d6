"""Summary of a page as JSON."""

from dataclasses import asdict

from harness.results.comparison import ComparisonGroup
from harness.results.records import Run
from reports.page import Page
from reports.summary import Cell, PerplexityRow, Row

VERSION = 1
"""Increases when a key is removed or changes its meaning; new keys may be added without."""


def to_document(page: Page, report: str) -> dict[str, object]:
    """Convert a page to JSON types; keys name the units of their values."""
    return {
        "version": VERSION,
        "report": report,
        "runs": len(page.results.runs),
        "rows": [_row(row) for section in page.sections for row in section.rows],
        "perplexities": [
            _perplexity(row) for section in page.sections for row in section.perplexities
        ],
        "comparisons": [
            _comparison(one) for section in page.sections for one in section.comparisons
        ],
        "gaps": [_gap(run) for run in page.results.gaps],
    }


def _row(row: Row) -> dict[str, object]:
    return {
        "model": row.subject.model,
        "soc": row.subject.soc,
        "target": row.subject.target,
        "emulator": row.subject.emulator,
        "container_sha256": row.subject.container_sha256,
        "workload": row.label,
        "runs": [run.id for run in row.runs],
        "metrics": {key: _cell(cell) for key, cell in row.cells.items()},
        "perplexity": dict(row.perplexity.values) if row.perplexity else None,
        "remarks": list(row.remarks),
        "output": row.output,
        "stability": row.grade or None,
        "sessions": len(row.runs),
    }


def _cell(cell: Cell) -> dict[str, object]:
    found = cell.stats
    return {
        "mean": found.mean,
        "sd": found.sd,
        "median": found.median,
        "min": found.minimum,
        "max": found.maximum,
        "repetitions": found.n,
        "sessions": found.sessions,
        "stability": asdict(cell.stability) if cell.stability else None,
    }


def _perplexity(row: PerplexityRow) -> dict[str, object]:
    definition = row.key.definition
    return {
        "model": row.key.subject.model,
        "target": row.key.subject.target,
        "emulator": row.key.subject.emulator,
        "container_sha256": row.key.subject.container_sha256,
        "dataset_sha256": row.key.dataset_sha256,
        "definition": definition.model_dump() if definition else None,
        "runs": [run.id for run in row.runs],
        **row.values,
        "remarks": list(row.remarks),
    }


def _comparison(group: ComparisonGroup) -> dict[str, object]:
    return {
        "group_id": group.group_id,
        "a": group.a.container.sha256,
        "b": group.b.container.sha256,
        "devices": list(group.devices),
        "emulator": group.a.device.emulator,
        "verdict": group.verdict.value,
        "metrics": {metric.key: asdict(found) for metric, found in group.metrics},
        "unchecked": group.unchecked,
    }


def _gap(run: Run) -> dict[str, object]:
    return {
        "run": run.id,
        "kind": run.kind,
        "model": run.container.model,
        "target": run.container.target,
        "device": run.device.serial,
        "status": run.status,
        "error": run.error,
    }
