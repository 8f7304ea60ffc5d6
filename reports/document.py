"""Summary of a page as JSON."""

from dataclasses import asdict

from harness.results.comparison import ComparisonGroup
from harness.results.gate_formats import to_document as to_gate_document
from harness.results.records import ContainerInfo, Run
from reports.changes import ShownChange
from reports.page import Page
from reports.summary import FailureGroup, SummaryRow

VERSION = 1
"""Increases when a key is removed or changes its meaning; new keys may be added without."""


def to_document(page: Page, report: str) -> dict[str, object]:
    """Convert a page to JSON types; keys name the units of their values."""
    return {
        "version": VERSION,
        "report": report,
        "runs": len(page.results.measured),
        "headline": asdict(page.headline),
        "gate": to_gate_document(page.results.gate) if page.results.gate else None,
        "changes": [_change(one) for section in page.sections for one in section.changes],
        "alerts": [one.facts for one in page.results.alerts],
        "rows": [_row(row) for section in page.sections for row in section.rows],
        "perplexities": [_row(row) for section in page.sections for row in section.perplexities],
        "tasks": [_row(row) for section in page.sections for row in section.tasks],
        "comparisons": [
            _comparison(one) for section in page.sections for one in section.comparisons
        ],
        "failures": [_failure(group) for group in page.failures],
        "gaps": [_gap(run) for run in page.results.gaps],
    }


def _change(change: ShownChange) -> dict[str, object]:
    series = change.series
    return {
        "series": series.id,
        "name": series.name,
        "emulator": series.emulator,
        "metric": series.metric.key,
        "unit": series.metric.unit,
        "verdict": change.verdict.value,
        "status": change.status,
        "alert": change.alert.id if change.alert else None,
        "before": change.before,
        "now": change.now,
        "ratio": change.ratio,
        "low": change.low,
        "high": change.high,
        "since": change.since.at,
        "commit": change.since.commit,
    }


def _row(row: SummaryRow) -> dict[str, object]:
    scored = row.scored
    return {
        "model": row.subject.model,
        "target": row.subject.target,
        "soc": row.subject.soc,
        "device": row.subject.device,
        "emulator": row.subject.emulator,
        "runtime": row.subject.runtime or None,
        "tool": row.subject.tool,
        "container_sha256": row.container.sha256,
        **_container(row.container),
        "workload": row.label,
        "notes": list(row.notes),
        "metrics": {key: _cell(row, key) for key in row.cells},
        "bandwidth_share": row.bandwidth_share,
        "dataset_sha256": (scored.text if scored else row.subject.text) or None,
        "definition": scored.scored.model_dump() if scored and scored.scored else None,
        "settings": dict(row.runs[-1].workload.sampler),
        "output": row.output,
        "stability": row.grade or None,
        "runs": [run.id for run in row.runs],
        "sessions": len(row.runs),
        "remarks": list(row.remarks),
    }


def _cell(row: SummaryRow, key: str) -> dict[str, object]:
    stats, stability = row.cells[key], row.stability.get(key)
    return {
        "mean": stats.mean,
        "sd": stats.sd,
        "median": stats.median,
        "min": stats.minimum,
        "max": stats.maximum,
        "repetitions": stats.n,
        "sessions": stats.sessions,
        "stability": asdict(stability) if stability else None,
    }


def _container(container: ContainerInfo) -> dict[str, object]:
    return {"precision": container.precision, "ars": list(container.ars), "cl": container.cl}


def _failure(group: FailureGroup) -> dict[str, object]:
    newest = group.newest
    return {
        "kind": newest.kind,
        "model": newest.container.model,
        **_container(newest.container),
        "status": newest.status,
        "error": newest.error,
        "devices": list(group.devices),
        "runs": [run.id for run in group.runs],
        "first": group.runs[0].created_at,
        "last": newest.created_at,
    }


def _comparison(group: ComparisonGroup) -> dict[str, object]:
    return {
        "group_id": group.group_id,
        "a": group.a.container.sha256,
        "b": group.b.container.sha256,
        "devices": list(group.devices),
        "emulator": group.a.device.emulator,
        "verdict": group.verdict.value,
        "threshold": group.threshold,
        "metrics": {one.metric: one.model_dump() for one in group.comparisons},
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
