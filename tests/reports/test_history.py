"""Histories, changes since the past, curves, and figures as CSV and markdown."""

import csv
import io
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete

from harness.results import schema
from harness.results.alerts import Alert, AlertState, assess, list_alerts, review_new
from harness.results.gate import judge_gate
from harness.results.history import Series, find_series
from harness.results.identity import Subject
from harness.results.metrics import METRICS, find_metric
from harness.results.records import Run, RunHead, RunMeans
from harness.results.statistics.changes import History, judge_all
from harness.results.statistics.medians import half_width
from harness.results.store import ResultsStore, RunFilter
from harness.results.verdicts import Verdict
from reports import charts, html_file, page
from reports.changes import ShownChange, find_changes
from reports.figures import Column, Figure
from reports.history import SeriesGroup, commit_range, find_present, group_series
from tests.harness.results.places import write_runs
from tests.reports import lab
from tests.reports.conftest import (
    START,
    MakeStore,
    Sample,
    changed,
    composed,
    html_of,
    perplexity,
    results_of,
    speeds,
)

DECODE = "decode_tokens_per_s"


def night(
    number: int,
    factor: float = 1.0,
    *,
    sessions: int = 2,
    sample: Sample | None = None,
    seed: int = 0,
) -> list[Run]:
    """Sessions of one night; the container is built anew each night."""
    phone = sample or Sample("SM8750", emulator=False, model="Llama-3.2-1B")
    noise = random.Random(1000 * seed + number)  # noqa: S311
    made = []
    for session in range(sessions):
        rate = 50 * factor * (1 + noise.gauss(0, 0.004))
        run = phone.run(
            10 * number + session + 10_000 * seed,
            "bench",
            speeds([20 * rate] * 4, [rate] * 4, [2 / rate] * 4, 1310),
            group_id=f"{number + 1000 * seed:032x}",
            session=session,
            created_at=START + timedelta(days=number, minutes=10 * session),
        )
        made.append(changed(run, container__sha256=f"{number:064x}"))
    return made


def series_of(runs: Sequence[Run]) -> tuple[Series, ...]:
    return find_series(
        [RunMeans.of(run) for run in runs], [RunHead.of(run, Subject.of(run).id) for run in runs]
    )


def history(runs: Sequence[Run]) -> tuple[SeriesGroup, ...]:
    return group_series(series_of(runs), map(RunMeans.of, runs))


def changes_of(
    runs: Sequence[Run], alerts: Sequence[Alert] | None = None
) -> tuple[ShownChange, ...]:
    series = series_of(runs)
    return find_changes(series, assess(series, alerts or ()))


def decode_of(runs: Sequence[Run], alerts: Sequence[Alert] | None = None) -> ShownChange:
    return next(one for one in changes_of(runs, alerts) if one.series.metric.key == DECODE)


def nights(factors: Sequence[float], **more: Any) -> list[Run]:  # noqa: ANN401  as for `night`
    return [run for n, factor in enumerate(factors) for run in night(n, factor, **more)]


def test_builds_of_one_model_are_one_subject_and_sessions_of_a_night_one_point() -> None:
    (group,) = history(nights([1.0] * 5))
    assert [len(point.runs) for point in group.points] == [2] * 5
    assert len({point.sha256 for point in group.points}) == 5
    first = night(0)
    means = [sum(run.values(DECODE)) / 3 for run in first]
    assert group.points[0].values[DECODE] == pytest.approx(sum(means) / 2)
    assert group.title == "Llama-3.2-1B W8A16 on SM8750, pp64+tg16"


def test_builds_of_one_evening_are_points_of_their_own() -> None:
    later = [changed(run, created_at=START + timedelta(hours=3)) for run in night(11)]
    (group,) = history([*night(0), *later])
    assert [len(point.runs) for point in group.points] == [2, 2]
    same = [changed(run, container=night(0)[0].container) for run in later]
    (group,) = history([*night(0), *same])
    assert [len(point.runs) for point in group.points] == [4]


def test_the_present_is_the_last_night_and_only_that_is_summed_up() -> None:
    runs = nights([1.0] * 11 + [0.7] * 3)
    (group,) = history(runs)
    assert len(group.present) == 1
    assert set(find_present([group])) == {run.id for run in runs[-2:]}
    (section,) = composed(runs).sections
    (row,) = section.rows
    assert row.runs == tuple(runs[-2:])
    assert row.cells[DECODE].mean == pytest.approx(35, rel=0.02)


def test_what_another_branch_measured_last_is_a_row_of_its_own() -> None:
    def on(branch: str, runs: Sequence[Run]) -> list[Run]:
        return [changed(run, provenance__git_branch=branch) for run in runs]

    last = night(5)
    hours = (-13, -10)  # the night is shown whole
    topic = [
        changed(
            run,
            id=f"{900 + number:032x}",
            container=last[0].container,
            created_at=run.created_at + timedelta(hours=hours[number]),
        )
        for number, run in enumerate(on("topic", night(5, 0.7)))
    ]
    trunk = on("trunk", [*nights([1.0] * 5), *last])
    whole = composed([*trunk, *topic])
    (section,) = whole.sections
    other, main = sorted(section.rows, key=lambda row: row.runs[0].created_at)
    assert (main.runs, other.runs) == (tuple(trunk[-2:]), tuple(topic))
    assert other.remarks[0] == "On the branch topic, which is not that of the history"
    assert {len(one.nights) for one in whole.results.series} == {6}


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ((0.9,) * 3, Verdict.REGRESSED),
        ((1.0, 1.0), Verdict.NO_DIFFERENCE),
        ((0.97,), Verdict.NO_DIFFERENCE),
        ((1.12,) * 4, Verdict.IMPROVED),
    ],
)
def test_a_change_has_the_verdict_of_the_history(last: tuple[float, ...], verdict: Verdict) -> None:
    runs = nights([1.0] * 20 + list(last))
    decode = decode_of(runs)
    assert decode.verdict is verdict
    assert decode.ratio == pytest.approx(last[-1], rel=0.01)
    assert decode.low is not None
    assert decode.high is not None
    assert decode.low < last[-1] < decode.high
    assert len(decode.trend) == 20 + len(last)
    latency = next(one for one in changes_of(runs) if one.series.metric.key == "ttft_s")
    assert latency.verdict is verdict  # lower is better there


def test_one_bad_night_is_no_regression_but_worth_a_line() -> None:
    runs = nights([1.0] * 12 + [0.9])
    decode = decode_of(runs)
    assert (decode.verdict, decode.is_suspect) == (Verdict.NO_VERDICT, True)
    assert decode.note == "one night is not enough, the next one will tell"
    headline = composed(runs).headline
    assert (headline.level, headline.words) == ("doubt", "1 suspected regression")
    (line,) = headline.lines
    assert "last night only: Time to first token +11" in line
    assert line.endswith("; one night is not enough, the next one will tell")


def test_suspects_of_one_night_are_one_cause() -> None:
    """Each night of these is at one commit, on both phones."""
    other = Sample("SM8650", emulator=False, model="Llama-3.2-1B")
    factors = [*[1.0] * 12, 0.9]
    runs = nights(factors) + nights(factors, sample=other, seed=2)
    assert composed(runs).headline.words == "1 suspected regression"


def test_what_did_not_change_is_folded() -> None:
    page = html_of(nights([1.0] * 12))
    assert "<p>Nothing changed.</p>" in page
    assert "series and metrics without a change</summary>" in page
    page = html_of(nights([1.0] * 12 + [0.8] * 3))
    folded = page.index("without a change</summary>")
    assert 'data-verdict="regressed"' in page[:folded]
    assert 'data-verdict="regressed"' not in page[folded:]
    assert 'data-verdict="no difference seen"' in page[folded:]
    assert "Nothing changed." not in page


def test_a_key_of_a_column_is_one_word() -> None:
    keys = [charts.metric_column(metric).key for metric in METRICS.values()]
    assert len(set(keys)) == len(keys)
    assert [key for key in keys if not re.fullmatch(r"[a-z0-9_]+", key)] == []
    assert charts.metric_column(find_metric("decode_energy_j_per_token")).key == (
        "decode_energy_mj_per_token"
    )


def test_a_row_says_whose_change_leaves_nights_out() -> None:
    phones = [Sample("SM8750", emulator=False, model="Llama-3.2-1B") for _ in range(3)]
    runs = [
        changed(run, device__serial=f"P{n}", container__sha256="a" * 64)
        for n, phone in enumerate(phones)
        for run in nights([1.0] * 20 + [0.8 if n == 2 else 1.0] * 4, sample=phone, seed=n)
    ]
    (row,) = composed(runs).sections[0].rows
    assert any(one.startswith("Decode: P2 alone -20") for one in row.remarks), row.remarks


def test_a_night_that_begins_earlier_by_the_clock_stands_alone() -> None:
    runs = nights([1.0] * 12)
    early = timedelta(minutes=-20)
    last = [changed(run, created_at=run.created_at + early) for run in night(12, 0.8)]
    decode = decode_of([*runs, *last])
    assert decode.ratio == pytest.approx(0.8, rel=0.01)
    assert decode.now == pytest.approx(sum(sum(r.values(DECODE)) / 3 for r in last) / 2)


def test_noisy_nights_give_no_verdict_and_few_nights_neither() -> None:
    noisy = decode_of(nights([1.0, 0.8, 1.2, 0.9, 1.15, 0.85, 0.92]))
    assert noisy.verdict is Verdict.NO_VERDICT
    few = decode_of(nights([1.0, 1.0, 0.5]))
    assert (few.verdict, few.note) == (Verdict.NO_VERDICT, "3 nights, and a verdict needs 10")
    assert changes_of(nights([1.0])) == ()


def test_a_change_of_level_is_judged_from_where_it_began() -> None:
    runs = nights([1.0] * 14 + [0.92] * 4)
    (group,) = history(runs)
    decode = decode_of(runs)
    (level,) = decode.series.changes
    assert (level.night, level.is_loss) == (14, True)
    assert decode.verdict is Verdict.REGRESSED
    assert decode.since.at == group.points[14].at
    assert decode.ratio == pytest.approx(0.92, rel=0.01)
    rows = list(csv.DictReader(io.StringIO(charts.history_figure(group).to_csv())))
    assert [number for number, row in enumerate(rows) if "Decode" in row["change"]] == [14]
    levels = [float(row[f"{DECODE}_level"]) for row in rows]
    assert (len(set(levels[:14])), len(set(levels[14:]))) == (1, 1)
    assert [levels[0], levels[-1]] == pytest.approx([50, 46], rel=0.01)
    assert all(one.changes == () for one in series_of(nights([1.0] * 18)))


def test_a_change_names_its_commits_and_what_else_differs() -> None:
    runs = [
        changed(
            run,
            provenance__git_commit=f"{number // 2:02x}" * 20,
            provenance__library_versions={"genie": "1.21" if number < 28 else "1.22"},
        )
        for number, run in enumerate(nights([1.0] * 14 + [0.9] * 4))
    ]
    (group,) = history(runs)
    (note,) = charts.history_figure(group).notes
    day, metrics, commits, *facts = note.replace(": ", "; ", 1).split("; ")
    assert (day, commits) == ("2026-12-04", "0d0d0d0d0d..0e0e0e0e0e")
    assert {words.split(" -")[0] for words in metrics.split(", ")} >= {"Decode"}
    assert "genie 1.21 → 1.22" in facts
    decode = decode_of(runs)
    assert commit_range(decode.series, decode.since) == commits
    assert commit_range(decode.series, decode.series.nights[0]) == "0" * 10


@pytest.mark.parametrize("state", ["acknowledged", "expected", "fixed"])
def test_what_somebody_has_settled_is_no_fresh_regression(state: AlertState) -> None:
    runs = nights([1.0] * 14 + [0.92] * 4)
    (fresh,) = [a for a in assess(series_of(runs), ()) if a.metric.key == DECODE]
    assert decode_of(runs, [fresh]).alert == fresh
    assert decode_of(runs).status == "regressed"
    settled = decode_of(runs, [replace(fresh, state=state, note="the new Genie")])
    assert settled.status == state
    assert settled.note == f"alert {fresh.id}: the new Genie"
    assert settled.verdict is Verdict.REGRESSED


def test_a_loss_stays_a_regression_until_it_is_settled() -> None:
    """As for a nightly job: a loss of long ago is the past once somebody has expected it."""
    runs = nights([1.0] * 12 + [0.9] * 24)
    decode = decode_of(runs)
    assert decode.status == "regressed"
    assert decode.alert is not None
    expected = replace(decode.alert, state="expected")
    assert decode_of(runs, [expected]).status == "no difference seen"


def test_a_recovery_says_that_the_loss_is_fixed() -> None:
    decode = decode_of(nights([1.0] * 20 + [0.8] * 4 + [1.0] * 6))
    assert decode.status == "fixed"
    assert "recovered on" in decode.note


def test_changes_come_worst_first() -> None:
    slower = Sample("SM8650", emulator=False, model="Other")
    runs = nights([1.0] * 20 + [0.9] * 3)
    runs += nights([1.0] * 20 + [0.8] * 3, sample=slower, seed=7)
    changes = changes_of(sorted(runs, key=lambda run: run.created_at))
    regressed = [change for change in changes if change.verdict is Verdict.REGRESSED]
    assert changes[: len(regressed)] == tuple(regressed)
    assert [c.gain for c in regressed] == sorted(c.gain for c in regressed)
    assert regressed[0].series.newest.container.model == "Other"


def test_the_headline_says_the_worst_first() -> None:
    whole = composed(nights([1.0] * 20 + [0.9] * 3))
    headline = whole.headline
    assert (headline.level, headline.words) == ("bad", "1 regression")
    (line,) = headline.lines
    (worst, *_) = whole.results.alerts
    assert line.startswith(f"{worst.name}, since 2026-12-10: ")
    assert all(f"(alert {alert.id})" in line for alert in whole.results.alerts)
    calm = composed(nights([1.0] * 11)).headline
    assert (calm.level, calm.words) == ("good", "Nothing regressed in 5 comparisons")
    none = composed(nights([1.0])).headline
    assert (none.level, none.words) == ("none", "No verdict yet")
    failed = changed(lab.sessions()[0], status="failed", error="no")
    doubt = composed([failed]).headline
    assert (doubt.level, doubt.words) == ("doubt", "1 recent run without a result")


def test_a_slow_loss_is_on_the_first_screen() -> None:
    slow = composed(nights([1 - 0.001 * max(0, night - 10) for night in range(110)]))
    lines = [line for line in slow.headline.lines if "against 90 days ago" in line]
    assert any(": Decode -" in line for line in lines)


def test_an_open_alert_stands_whatever_a_report_shows(make_store: MakeStore) -> None:
    """The loss is twenty nights old, and the report and the pruned database show fourteen."""
    runs = nights([1.0] * 20 + [0.9] * 20)
    db = str(make_store(runs))
    with ResultsStore.open(db) as store:
        review_new(store)
        told = {alert.id: alert.loss for alert in list_alerts(store)}
    assert len(told) == 3
    window = page.load(db, RunFilter(since=START + timedelta(days=26)))
    assert {alert.id: alert.loss for alert in window.alerts} == told
    headline = page.compose(window).headline
    assert (headline.level, headline.words) == ("bad", "1 regression")
    assert all(len(one.points) == 14 for one in window.groups)
    with ResultsStore.open(db) as store, store.database.writing() as connection:
        connection.execute(
            delete(schema.runs).where(schema.runs.c.created_at < runs[52].created_at)
        )
    pruned = page.load(db)
    assert {alert.id: alert.loss for alert in pruned.alerts} == told
    assert page.compose(pruned).headline.words == "1 regression"


def test_an_open_loss_of_a_history_that_has_ended_stands_in_every_window(
    make_store: MakeStore,
) -> None:
    """Nobody has asked for alerts yet."""
    runs = nights([1.0] * 15 + [0.8] * 5)
    other = Sample("SM8650", emulator=False, model="Other")
    runs += [changed(run, id=f"a{run.id[1:]}") for run in nights([1.0] * 30, sample=other, seed=7)]
    db = str(make_store(sorted(runs, key=lambda run: run.created_at)))
    window = page.load(db, RunFilter(since=START + timedelta(days=26)))
    assert {one.run.container.model for one in window.measured} == {"Other"}
    assert page.compose(window).headline.words == "1 regression"


def test_only_what_is_well_is_green() -> None:
    """An acknowledged loss is the only comparison; a night later another series falls by 20 %."""
    runs = nights([1.0] * 14 + [0.9] * 4)
    other = Sample("SM8650", emulator=False, model="Other")
    runs += nights([1.0] * 17 + [0.8], sample=other, seed=7)
    runs.sort(key=lambda run: run.created_at)
    results = results_of(runs)
    known = [replace(alert, state="acknowledged") for alert in results.alerts]
    headline = page.compose(replace(results, alerts=tuple(known))).headline
    said = "1 acknowledged regression and 1 suspected regression"
    assert (headline.level, headline.words) == ("doubt", said)
    assert "Other" in headline.lines[0]
    settled = [replace(alert, state="expected") for alert in results.alerts]
    headline = page.compose(replace(results, alerts=tuple(settled))).headline
    assert (headline.level, headline.words) == ("doubt", "1 suspected regression")


def test_long_histories_are_thinned_where_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_file, "MOST_POINTS", 100)
    monkeypatch.setattr(html_file, "ALL_POINTS", 4_000)
    (group,) = history(nights([1.0] * 30 + [0.8] * 120))
    figure = charts.history_figure(group)
    (shown,) = html_file.thin([figure])
    change = next(row for row in figure.rows if row[-2] is not None)
    assert change in shown.rows
    assert len(shown.rows) <= html_file.MOST_POINTS + 1
    assert shown.rows[0] == figure.rows[0]
    assert shown.rows[-50:] == figure.rows[-50:]
    many = html_file.thin([figure] * 100)
    assert sum(len(one.rows) for one in many) <= html_file.ALL_POINTS + 100


def test_a_history_is_a_figure_with_commits() -> None:
    (group,) = history(nights([1.0] * 3))
    figure = charts.history_figure(group)
    rows = list(csv.DictReader(io.StringIO(figure.to_csv())))
    assert len(rows) == 3
    assert float(rows[0][DECODE]) == pytest.approx(group.points[0].values[DECODE])
    assert float(rows[0]["ttft_ms"]) == pytest.approx(1000 * group.points[0].values["ttft_s"])
    assert rows[0]["commit"] == "c0ffee"
    assert len({row["container"] for row in rows}) == 1  # twelve digits of small numbers


def test_lengths_make_curves_and_one_length_does_not() -> None:
    runs = [
        changed(run, workload__prompt_tokens=prompt, group_id=f"{9000 + number:032x}")
        for number, prompt in enumerate((64, 512, 2048))
        for run in night(0, 1 - 0.1 * number, seed=number)
    ]
    found = {figure.id: figure for figure in charts.curve_figures(history(runs))}
    assert set(found) == {
        "curve-depth-decode", "curve-prompt-prefill", "curve-prompt-decode", "curve-prompt-ttft"
    }  # fmt: skip
    assert [row[1] for row in found["curve-prompt-decode"].rows] == [64.0, 512.0, 2048.0]
    assert found["curve-depth-decode"].rows == tuple(
        (str(row[0]).replace("SM8750, CL", "SM8750, tg16, CL"), *row[1:])
        for row in found["curve-prompt-decode"].rows
    ), "a decode rate is one behind the prompt of its run"
    assert charts.curve_figures(history(night(0))) == ()


def test_speeds_stand_against_the_tokens_before_them() -> None:
    """A line for each test of each phone and model, and none of several depths at one prompt."""
    phones = [Sample(soc, emulator=False, model="Llama-3.2-1B") for soc in ("SM8750", "SM8650")]
    runs = [
        changed(
            phone.run(
                100 * number + depth // 64, "bench", speeds([r] * 4, [r] * 4, [1 / r] * 4, 9)
            ),
            workload__depth_tokens=depth,
        )
        for number, phone in enumerate(phones)
        for depth in (0, 128, 256, 512)
        for r in [60.0 - depth / 64 - number]
    ]
    found = {figure.id: figure for figure in charts.curve_figures(history(runs))}
    assert set(found) == {"curve-depth-prefill", "curve-depth-decode", "curve-depth-ttft"}
    for name, test, first in (("prefill", "pp64", 0.0), ("decode", "tg16", 64.0)):
        rows = found[f"curve-depth-{name}"].rows
        lines = [f"Llama-3.2-1B W8A16 on {soc}, {test}, CL 4096" for soc in ("SM8650", "SM8750")]
        assert [row[0] for row in rows] == [line for line in lines for _ in range(4)]
        assert [row[1] for row in rows[:4]] == [first + depth for depth in (0, 128, 256, 512)]
        assert [row[2] for row in rows[4:]] == [60.0, 58.0, 56.0, 52.0]
    spec = found["curve-depth-prefill"].spec["encoding"]["x"]  # type: ignore[index]
    assert spec["axis"]["values"] == [0, 128, 256, 512]
    assert spec["scale"]["type"] == "symlog"


@pytest.mark.parametrize(
    ("now", "words", "is_suspect"),
    [(13.026, "no difference seen", False), (13.5, "no verdict", True)],
)
def test_a_perplexity_of_two_runs_has_the_verdict_of_the_gate(
    tmp_path: Path, now: float, words: str, *, is_suspect: bool
) -> None:
    """It has no noise, so its change needs no interval; an alert of it needs another night."""
    phone = Sample("SM8750", emulator=False)
    runs = [
        changed(phone.run(n, "perplexity", perplexity(value, 12, 13)), created_at=at)
        for n, value in enumerate((13.0, now))
        for at in [START + timedelta(days=n)]
    ]
    (change,) = (one for one in changes_of(runs) if one.series.metric.key == "perplexity")
    assert (change.status, change.is_suspect) == (words, is_suspect)
    with ResultsStore.open(tmp_path / "results.db") as store:
        write_runs(store, runs)
        (cell,) = judge_gate(store, "previous").cells
    assert cell.verdict == ("regressed" if is_suspect else words)
    assert change.note == ("2 nights, and a verdict needs 10" if is_suspect else "")


def test_perplexity_stands_against_bits_and_size() -> None:
    phone = Sample("SM8750", emulator=False)
    runs = []
    for number, (precision, mib) in enumerate((("W8A16", 8), ("W4A16", 5))):
        run = phone.run(number, "perplexity", perplexity(13.0 + number, 12, 13))
        size = {"container__size_bytes": mib << 20, "container__parameters": 8 << 20}
        sha256 = f"{number:064x}"
        runs.append(changed(run, container__precision=precision, container__sha256=sha256, **size))
    found = {figure.id: figure for figure in charts.curve_figures(history(runs))}
    assert sorted(str(row[2]) for row in found["perplexity-bits"].rows) == ["5.0", "8.0"]
    assert sorted(str(row[2]) for row in found["perplexity-size"].rows) == ["5.0", "8.0"]


def test_csv_and_markdown_survive_any_text() -> None:
    nasty = 'a|b,"c"\n\x1b[31m\u202e<b>'
    figure = Figure("x", "t", "", (Column("k", "K"), Column("n", "N", "number")), ((nasty, 1.5),))
    ((header, row),) = [list(csv.reader(io.StringIO(figure.to_csv())))]
    assert header == ["k", "n"]
    assert row == ['a|b,"c"\n\u241b[31m[U+202E]<b>', "1.5"]
    assert figure.to_markdown().splitlines()[2] == '| a\\|b,"c" \u241b[31m[U+202E]<b> | 1.50 |'


def test_the_store_computes_the_means(make_store: MakeStore) -> None:
    runs = nights([1.0] * 3)
    with ResultsStore.open(make_store(runs)) as store:
        found = store.measured()
    assert [one.run.id for one in found] == [run.id for run in runs]
    assert [one.run.measurements for one in found] == [()] * 6
    for one, run in zip(found, runs, strict=True):
        expected = RunMeans.of(run).means
        assert one.means.keys() == expected.keys()
        for key, mean in expected.items():
            assert one.means[key] == pytest.approx(mean)


def test_an_interval_holds_what_it_promises() -> None:
    """Where nights go together, of which 14 of a side look like far less noise than it is."""
    series = []
    for seed in range(120):
        random = np.random.default_rng(seed)
        logs = random.standard_normal(90)
        for night in range(1, 90):
            logs[night] = 0.8 * logs[night - 1] + 0.6 * logs[night]
        series.append(0.02 * logs)
    judged = judge_all([History(np.exp(logs).tolist(), range(90), ["x"] * 90) for logs in series])
    held = 0
    for logs, one in zip(series, judged, strict=True):
        before, since = logs[62:76].tolist(), logs[76:].tolist()
        off = statistics.median(since) - statistics.median(before)
        held += abs(off) <= (half_width(before, since, one.wandering) or 0.0)
    assert held >= 112
