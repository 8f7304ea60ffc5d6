"""Thousands of runs in a report."""

import re

import pytest

from harness.results.records import Run, RunMeans
from reports.content import list_runs
from reports.page import brief_results
from tests.reports.conftest import Sample, html_of, speeds

_VALUES = speeds([999, 1000, 1002], [50, 51, 52], [0.04, 0.04, 0.04], 1310)


def _many(count: int) -> list[Run]:
    """An old run on another phone, and then `count` on one."""
    old = Sample("SM8650", emulator=False).run(0, "bench", _VALUES)
    phone = Sample("SM8750", emulator=True)
    return [old, *(phone.run(number, "bench", _VALUES) for number in range(1, count + 1))]


def test_the_newest_and_one_of_each_row_are_in_full() -> None:
    runs = _many(30)
    found = list_runs(runs, most=10)
    assert found.full == (runs[0], *runs[-9:])
    assert found.brief == tuple(runs[1:-9])
    assert list_runs(runs, most=31).brief == ()


def test_every_run_is_listed_once_and_links_lead_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_runs, "__defaults__", (10,))  # of 200
    runs = _many(30)
    html = html_of(runs)
    listed = re.findall(r'id="run-([0-9a-f]+)"', html)
    assert sorted(listed) == sorted(run.id for run in runs)
    assert set(re.findall(r'href="#run-([0-9a-f]+)"', html)) <= set(listed)
    assert "21 older runs in one line each" in html
    (line,) = re.findall(rf'<li id="run-{runs[1].id}">.*</li>', html)
    assert len(line) < 500
    assert "Prefill 1,001 tokens/s, Decode 51.50 tokens/s, Time to first token 40.0 ms" in line
    assert '<i class="chip">emulator</i>' in line


def test_a_run_without_speeds_shows_its_perplexity() -> None:
    sample = Sample("SM8750", emulator=True)
    scored = sample.run(1, "perplexity", {"perplexity": [25.5]})
    assert brief_results(RunMeans.of(scored)) == "Perplexity on device 25.500"
    assert brief_results(RunMeans.of(sample.run(2, "perplexity", {}))) == ""


def test_few_runs_are_all_in_full() -> None:
    assert "in one line each" not in html_of(_many(3))
