"""A gate's verdict for machines and pull requests: JSON, markdown, and JUnit's XML."""

import html
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from xml.etree import ElementTree as ET

from harness.results.gate import Gate, GateCell, Side
from harness.results.metrics import Metric
from harness.results.statistics.unpaired import CONFIDENCE
from harness.results.verdicts import Verdict, in_percent
from harness.words import NO_VALUE, pluralize

_COLUMNS = ("cell", "metric", "baseline", "now", "change", f"{CONFIDENCE:.0%} interval", "verdict")
_MARKUP = re.compile(r"([\\`*_\[\]|~#])")
_NOT_XML = re.compile("[^\t\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_document(gate: Gate) -> dict[str, object]:
    """Make the answer of `--json`."""
    return {
        "baseline": gate.reference,
        "candidate": gate.candidate,
        "verdict": gate.verdict.value,
        "threshold": gate.threshold,
        "perplexity_threshold": gate.perplexity_threshold,
        "confidence": CONFIDENCE,
        "cells": [
            {
                "cell": cell.name,
                "emulator": cell.key.emulator,
                "metric": cell.metric.key,
                "unit": cell.metric.unit,
                "verdict": cell.verdict.value,
                "reason": cell.reason,
                "ratio": cell.ratio,
                "low": cell.low,
                "high": cell.high,
                "device": cell.device,
                "baseline": None if cell.baseline is None else asdict(cell.baseline),
                "candidate": None if cell.candidate is None else asdict(cell.candidate),
                "runs": list(cell.runs),
                "alerts": [alert.id for alert in cell.alerts],
            }
            for cell in gate.cells
        ],
        "new": list(gate.new),
        "alerts": [alert.id for alert in gate.alerts],
    }


def summarize(gate: Gate) -> str:
    """Count the verdicts: `1 regressed, 3 no difference seen; 2 cells have no baseline`."""
    counts = Counter(cell.verdict for cell in gate.cells)
    verdicts = [f"{counts[one]} {one}" for one in Verdict if counts[one]]
    parts = [", ".join(verdicts) or "nothing to compare"]
    if gate.new:
        verb = "has" if len(gate.new) == 1 else "have"
        parts.append(f"{pluralize(len(gate.new), 'cell')} {verb} no baseline")
    if gate.alerts:
        parts.append(f"{pluralize(len(gate.alerts), 'alert')} unsettled")
    return "; ".join(parts)


def sides(gate: Gate) -> str:
    """Name what was judged, and the points of the baseline that it was held against."""
    points = dict.fromkeys(cell.baseline.point for cell in gate.cells if cell.baseline)
    against = " and ".join(list(points)[:3]) + (" and others" if len(points) > 3 else "")
    return f"{gate.candidate} against {gate.reference}" + (f" ({against})" if points else "")


def cells_of(cell: GateCell) -> tuple[str, ...]:
    """Format a cell's row under `baseline`, `now`, `change` and the interval."""
    return (
        _side(cell.baseline, cell.metric),
        _side(cell.candidate, cell.metric),
        *in_percent(cell.ratio, cell.low, cell.high),
    )


def to_lines(gate: Gate) -> list[str]:
    """Write it line by line, for a terminal."""
    lines = []
    for cell in gate.cells:
        before, now, change, interval = cells_of(cell)
        what = f"{cell.verdict}: {cell.name}, {cell.metric.label}"
        lines.append(f"{what}: {before} to {now}, {change} ({interval}); {cell.reason}")
    lines += [f"no baseline: {name}" for name in gate.new]
    lines += [gate.notice] if gate.has_emulator else []
    return [*lines, f"{sides(gate)}: {gate.verdict} ({summarize(gate)})"]


def to_markdown(gate: Gate) -> str:
    """Write it as a comment of a pull request; cells without a difference are folded."""
    telling = [cell for cell in gate.cells if cell.verdict is not Verdict.NO_DIFFERENCE]
    quiet = [cell for cell in gate.cells if cell.verdict is Verdict.NO_DIFFERENCE]
    lines = [f"### qnnfarm gate: {gate.verdict}", "", _plain(sides(gate)), ""]
    limits = f"{gate.threshold:.1%} (perplexity: {gate.perplexity_threshold:.1%})"
    lines += [f"{_plain(summarize(gate))}. Losses of up to {limits} are tolerated.", ""]
    if telling:
        lines += [*_table(telling), ""]
    if quiet:
        heading = pluralize(len(quiet), "measurement")
        lines += ["<details>", f"<summary>{heading} without a difference</summary>", ""]
        lines += [*_table(quiet), "", "</details>", ""]
    if gate.new:
        lines += [f"Without a baseline: {', '.join(map(_plain, gate.new))}.", ""]
    if gate.has_emulator:
        lines += [gate.notice, ""]
    return "\n".join(lines)


def to_junit(gate: Gate) -> str:
    """Write it as a JUnit file: a regression is a failure, a missing verdict an error."""
    regressions = sum(cell.verdict is Verdict.REGRESSED for cell in gate.cells)
    undecided = sum(cell.verdict is Verdict.NO_VERDICT for cell in gate.cells)
    suite = ET.Element(
        "testsuite",
        name="qnnfarm gate",
        tests=str(len(gate.cells)),
        failures=str(regressions),
        errors=str(undecided),
        skipped="0",
    )
    for cell in gate.cells:
        case = ET.SubElement(
            suite, "testcase", classname=_xml(cell.name), name=cell.metric.key, time="0"
        )
        tag = {Verdict.REGRESSED: "failure", Verdict.NO_VERDICT: "error"}.get(cell.verdict)
        words = _xml(cell.reason)
        if tag is not None:
            ET.SubElement(case, tag, message=words, type=cell.verdict).text = words
        else:
            ET.SubElement(case, "system-out").text = f"{cell.verdict.value}: {words}"
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _table(cells: Iterable[GateCell]) -> list[str]:
    rule = ["---", "---", "---:", "---:", "---:", "---:", "---"]
    rows = [
        (
            _plain(cell.name),
            _plain(cell.metric.label),
            *map(_plain, cells_of(cell)),
            f"**{cell.verdict}**: {_plain(cell.reason)}",
        )
        for cell in cells
    ]
    return [f"| {' | '.join(row)} |" for row in (_COLUMNS, rule, *rows)]


def _side(side: Side | None, metric: Metric) -> str:
    return NO_VALUE if side is None else f"{metric.show(side.mean)} ({side.sessions})"


def _plain(text: str) -> str:
    """Return text that markdown shows as it is: no markup, no HTML, no mention of anybody."""
    single = " ".join(_xml(text).split())
    return _MARKUP.sub(r"\\\1", html.escape(single, quote=False)).replace("@", "&#64;")


def _xml(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text.replace("\n", " "))
