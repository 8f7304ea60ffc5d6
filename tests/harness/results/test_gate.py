"""Gates: which results a baseline means, and what is said of new ones."""

import json
import random
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.errors import NotStoredError, WrongUseError
from harness.results import gate_formats
from harness.results.baseline import find_nights
from harness.results.gate import Gate, GateCell, GateOptions, _adjusted, _estimate, judge_gate
from harness.results.history import SeriesFilter, read_series
from harness.results.identity import Subject
from harness.results.metrics import Measurement, Metric, find_metric
from harness.results.records import OutputCheck, PerplexityDefinition, Run, WorkloadRecord
from harness.results.store import ResultsStore
from harness.results.verdicts import Verdict, judge
from tests.harness.results.places import make_run, write_runs
from tests.reports.conftest import changed

NIGHT = datetime(2026, 11, 1, 2, tzinfo=UTC)
DECODE = GateOptions(metrics=("decode_tokens_per_s",))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResultsStore]:
    with ResultsStore.open(tmp_path / "results.db") as opened:
        yield opened


def session(
    value: float, night: int, *, commit: str = "", branch: str = "main", serial: str = "R1",
    metric: str = "decode_tokens_per_s", minute: int = 0, **changes: object,
) -> Run:  # fmt: skip
    run = make_run(
        status="done",
        created_at=NIGHT + timedelta(days=night, minutes=minute),
        measurements=[Measurement(metric=metric, value=value)],
    )
    origin = {"git_commit": commit or f"{night:040x}", "git_branch": branch}
    run = changed(run, provenance=run.provenance.model_copy(update=origin))
    return changed(run, device__serial=serial, device__emulator=False, **changes)


def add(store: ResultsStore, *runs: Run) -> None:
    write_runs(store, runs)


def night(
    store: ResultsStore, number: int, level: float, *, sessions: int = 3, noise: float = 0.01,
    **changes: object,
) -> None:  # fmt: skip
    source = random.Random(number)  # noqa: S311
    values = [level * (1 + source.gauss(0, noise)) for _ in range(sessions)]
    made = (session(v, number, minute=n, **changes) for n, v in enumerate(values))  # type: ignore[arg-type]
    write_runs(store, made)


def verdicts(gate: Gate) -> list[str]:
    return [cell.verdict.value for cell in gate.cells]


@pytest.mark.parametrize(
    ("level", "verdict"),
    [
        (20.0, Verdict.NO_DIFFERENCE),
        (14.0, Verdict.REGRESSED),
        (24.0, Verdict.IMPROVED),
        (19.6, Verdict.NO_DIFFERENCE),
    ],
)
def test_the_newest_results_against_those_before(
    store: ResultsStore, level: float, verdict: Verdict
) -> None:
    night(store, 0, 5.0)
    night(store, 1, 20.0)
    night(store, 2, level)
    gate = judge_gate(store, "previous", options=DECODE)
    assert gate.verdict is verdict
    (cell,) = gate.cells
    assert cell.baseline is not None
    assert cell.candidate is not None
    assert (cell.baseline.sessions, cell.candidate.sessions) == (3, 3)
    assert "2026-11-02" in cell.baseline.point
    assert cell.name == "tiny_llama W8A16 pp64+tg16 on SM8750"


@pytest.mark.parametrize(("minutes", "nights"), [(11 * 60, 1), (13 * 60, 2)])
def test_a_night_ends_with_a_pause(store: ResultsStore, minutes: int, nights: int) -> None:
    """As in a history: what one rule puts together is judged together."""
    for minute, level in ((0, 20.0), (1, 20.1), (minutes, 14.0), (minutes + 1, 14.1)):
        add(store, session(level, 0, minute=minute))
    heads = store.heads()
    assert len(list(find_nights(heads))) == nights
    (series,) = read_series(store, SeriesFilter(DECODE.metrics))
    assert len(series.nights) == nights
    if nights == 2:
        assert verdicts(judge_gate(store, "previous", options=DECODE)) == ["regressed"]


def test_phones_have_levels_of_their_own(store: ResultsStore) -> None:
    """The new results are of the faster phone mostly; that is no gain, and hides no loss."""
    for number, levels in enumerate(({"R1": 10, "R2": 20}, {"R1": 9, "R2": 18})):
        for index in range(4):
            serial = "R2" if index < (1 if number == 0 else 3) else "R1"
            value = levels[serial] * (1 + 0.002 * (index % 2))
            add(store, session(value, number, serial=serial, minute=index))
    (cell,) = judge_gate(store, "previous", options=DECODE).cells
    assert cell.verdict is Verdict.REGRESSED
    assert cell.ratio == pytest.approx(0.9, abs=0.005)


@pytest.mark.parametrize(("sessions", "verdict"), [(3, "regressed"), (1, "no verdict")])
def test_one_slow_phone_is_named(store: ResultsStore, sessions: int, verdict: str) -> None:
    """More sessions of all phones would decide nothing that those of each have not."""
    for serial, level in (("P1", 20.0), ("P2", 21.0), ("P3", 19.0)):
        night(store, 0, level, serial=serial, sessions=sessions, noise=0.003)
        now = 0.8 * level if serial == "P3" else level
        night(store, 1, now, serial=serial, sessions=sessions, noise=0.003)
    (cell,) = judge_gate(store, "previous", options=DECODE).cells
    assert cell.verdict == verdict
    assert re.search(r"P3 (alone, .*: 19\.\d% worse|-19\.\d%)", cell.reason)
    assert cell.device == ("P3" if sessions > 1 else None)


def test_phones_that_change_alike_are_not_told_apart(store: ResultsStore) -> None:
    for serial, level in (("P1", 20.0), ("P2", 21.0), ("P3", 19.0)):
        night(store, 0, level, serial=serial, noise=0.003)
        night(store, 1, 0.9 * level, serial=serial, noise=0.003)
    (cell,) = judge_gate(store, "previous", options=DECODE).cells
    assert (cell.verdict, cell.device) == (Verdict.REGRESSED, None)


def test_other_phones_say_nothing(store: ResultsStore) -> None:
    night(store, 0, 20.0, serial="R1")
    night(store, 1, 10.0, serial="R2")
    gate = judge_gate(store, "previous", options=DECODE)
    assert gate.verdict is Verdict.NO_VERDICT
    assert gate.cells[0].reason == "no device has measured both sides"


def test_one_session_has_no_verdict(store: ResultsStore) -> None:
    night(store, 0, 20.0)
    night(store, 1, 10.0, sessions=1)
    (cell,) = judge_gate(store, "previous", options=DECODE).cells
    assert cell.verdict is Verdict.NO_VERDICT
    assert "1 session against 3, and a verdict needs 2 of each side" in cell.reason


def test_noise_is_told_from_loss(store: ResultsStore) -> None:
    night(store, 0, 20.0, noise=0.2)
    night(store, 1, 18.0, noise=0.2)
    (cell,) = judge_gate(store, "previous", options=DECODE).cells
    assert cell.verdict is Verdict.NO_VERDICT
    assert "sessions vary too much" in cell.reason


def test_many_cells_raise_few_alarms() -> None:
    """Of 50 gates over 20 equal cells with 4 % noise, 1 or 2 may hold a false alarm."""
    source = random.Random(1)  # noqa: S311
    metric = find_metric("decode_tokens_per_s")
    key = Subject.of(session(1.0, 0))
    false = 0
    for _ in range(50):
        cells = []
        for _ in range(20):
            sides = [[("R1", 20 * (1 + source.gauss(0, 0.04))) for _ in range(4)] for _ in "ab"]
            cell = GateCell(key, "x", metric, Verdict.NO_VERDICT, "")
            cells.append(_estimate(cell, *sides))
        judged = _adjusted(cells, GateOptions(threshold=0.0))
        false += any(c.verdict is Verdict.REGRESSED for c in judged)
    assert false <= 4


def test_what_else_changed_is_named_and_forbids_nothing(store: ResultsStore) -> None:
    night(store, 0, 20.0)
    night(store, 1, 10.0, provenance__library_versions={"genie": "1.22"})
    (cell,) = judge_gate(store, "previous", options=DECODE).cells
    assert cell.verdict is Verdict.REGRESSED
    assert cell.reason.endswith("what else changed: genie 1.21 → 1.22")


def test_other_precisions_are_not_comparable_unless_asked_for(store: ResultsStore) -> None:
    night(store, 0, 20.0)
    night(store, 1, 10.0, container__precision="W4A16")
    (cell,) = judge_gate(store, "previous", options=DECODE).cells
    assert cell.verdict is Verdict.NO_VERDICT
    assert cell.reason == ("not comparable, it differs in precision (W8A16 before, W4A16 now)")
    across = GateOptions(DECODE.metrics, across=("precision",))
    assert judge_gate(store, "previous", options=across).verdict is Verdict.REGRESSED


def test_a_long_night_of_many_models_is_judged_whole_and_against_the_night_before(
    store: ResultsStore,
) -> None:
    for number, turn, model in product(range(2), range(2), range(10)):
        minute = (10 * turn + model) * 45
        run = session(20.0 - 6 * number + 0.01 * turn, number, minute=minute, commit="c" * 40)
        add(store, changed(run, container__model=f"m{model:02d}"))
    gate = judge_gate(store, "previous", options=DECODE)
    assert verdicts(gate) == ["regressed"] * 10
    assert {cell.baseline.point for cell in gate.cells if cell.baseline} == {
        "cccccccccccc, 2026-11-01"
    }
    assert {len(one.nights) for one in read_series(store, SeriesFilter(DECODE.metrics))} == {2}


def test_hosts_with_other_commits_have_their_nights_side_by_side(store: ResultsStore) -> None:
    for number, index, host in product(range(2), range(6), range(2)):
        commit = "ab"[host] * 39 + str(number)
        add(store, session(20.0, number, minute=40 * index + 20 * host, commit=commit))
    assert len(list(find_nights(store.heads()))) == 4
    (series,) = read_series(store, SeriesFilter(DECODE.metrics))
    assert [len(night.sessions) for night in series.nights] == [6] * 4
    (cell,) = judge_gate(store, "previous", options=DECODE).cells
    assert cell.baseline is not None
    assert (cell.baseline.sessions, cell.baseline.point[-10:]) == (6, "2026-11-01")


def test_a_branch_has_neither_a_say_in_the_history_nor_in_the_baseline_of_main(
    store: ResultsStore,
) -> None:
    for number in range(12):
        night(store, number, 20.0)
    for number in range(3):
        night(store, 8 + number, 17.6, branch="topic", commit=f"{number:x}" * 40)
    assert read_series(store, SeriesFilter(DECODE.metrics))[0].changes == ()
    night(store, 12, 20.0)
    assert judge_gate(store, "previous", options=DECODE).verdict is Verdict.NO_DIFFERENCE
    gate = judge_gate(store, "previous", candidate="topic", options=DECODE)
    assert gate.verdict is Verdict.REGRESSED
    (topic,) = read_series(store, SeriesFilter(DECODE.metrics, branch="topic"))
    assert len(topic.nights) == 3


def test_a_cell_without_a_soc_is_named_by_its_device(store: ResultsStore) -> None:
    for model, name in (("RTX 4090", "RTX 4090"), (None, "an unknown device")):
        device: dict[str, Any] = {
            "device__soc": "",
            "device__model": model,
            "device__manufacturer": None,
        }
        for number in range(2):
            night(store, number, 20.0, **device)
        names = [cell.name for cell in judge_gate(store, "previous", options=DECODE).cells]
        assert f"tiny_llama W8A16 pp64+tg16 on {name}" in names


def test_two_containers_of_one_model_are_two_cells(store: ResultsStore) -> None:
    for number in range(2):
        night(store, number, 20.0)
        w4: dict[str, Any] = {
            "container__precision": "W4A16",
            "container__sha256": f"{number}" * 64,
        }
        night(store, number, 20.0 * (2 - number), **w4)
    gate = judge_gate(store, "previous", options=DECODE)
    assert [(cell.name.split()[1], cell.verdict.value) for cell in gate.cells] == [
        ("W4A16", "regressed"),
        ("W8A16", "no difference seen"),
    ]


def test_a_cell_that_is_gone_or_failed_has_no_verdict_and_a_new_one_none_to_have(
    store: ResultsStore,
) -> None:
    night(store, 0, 20.0)
    night(store, 1, 20.0, container__model="other")
    gate = judge_gate(store, "previous", options=DECODE)
    assert [cell.reason for cell in gate.cells] == ["the baseline has it, the new results have not"]
    assert gate.new == ("other W8A16 pp64+tg16 on SM8750",)
    failed = changed(session(20.0, 2), status="failed", error="the device went away")
    failed = changed(failed, measurements=())
    add(store, failed)
    gate = judge_gate(store, "2026-11-01", options=DECODE)
    assert [cell.reason for cell in gate.cells] == ["no result: the device went away"]
    wrong = OutputCheck(outcome="failed", reason="it is empty")
    add(store, changed(failed, id="a" * 32, check=wrong))
    gate = judge_gate(store, "2026-11-01", options=DECODE)
    assert gate.verdict is Verdict.REGRESSED
    assert gate.cells[0].reason == "the output is wrong: it is empty"


@pytest.mark.parametrize(
    ("perplexity", "verdict"),
    [(18.08, "no difference seen"), (18.144, "regressed"), (17.8, "improved")],
)
def test_a_perplexity_has_no_noise(store: ResultsStore, perplexity: float, verdict: str) -> None:
    work = WorkloadRecord(
        runner="genie_perplexity.py",
        dataset_sha256="7" * 64,
        perplexity=PerplexityDefinition(positions="first_cl_minus_ar", windows=8, tokens=1280),
    )
    for number, value in enumerate((18.0, perplexity)):
        run = session(value, number, metric="perplexity", workload=work, kind="perplexity")
        add(store, run)
    assert verdicts(judge_gate(store, "previous")) == [verdict]


def test_sides_of_a_comparison_are_no_sessions_of_a_night(store: ResultsStore) -> None:
    night(store, 0, 20.0, sessions=2)
    night(store, 1, 20.0, sessions=2)
    for minute in range(12):
        add(store, session(14.0, 1, minute=20 + minute, label="AB"[minute % 2]))
    (cell,) = judge_gate(store, "previous", options=DECODE).cells
    assert cell.candidate is not None
    assert (cell.candidate.sessions, cell.verdict) == (2, Verdict.NO_DIFFERENCE)


@given(
    st.sampled_from(["decode_tokens_per_s", "ttft_s"]).map(find_metric),
    st.floats(0.3, 3.0),
    st.floats(1.0, 1.6),
    st.booleans(),
)
@example(find_metric("decode_tokens_per_s"), 1.291, 1.227, True)
@example(find_metric("ttft_s"), 0.642, 1.018, True)
def test_no_difference_is_never_said_of_one(
    metric: Metric, ratio: float, half: float, by_chance: bool
) -> None:
    low, high = ratio / half, ratio * half
    verdict, sentence = judge(metric, ratio, low, high, 0.05, by_chance=by_chance)
    certain = min(abs(low - 1), abs(high - 1)) > 0.05 and (low > 1 or high < 1)
    assert (verdict is Verdict.NO_DIFFERENCE) == sentence.endswith("is ruled out")
    assert not (certain and verdict is Verdict.NO_DIFFERENCE)
    assert not (metric.gain(ratio) > 0 and verdict is Verdict.REGRESSED)


class TestReferences:
    """Night 0 and 1 on main, 2 on a branch, 3 judged."""

    @pytest.fixture(autouse=True)
    def _nights(self, store: ResultsStore) -> None:
        for number, (level, branch) in enumerate(
            [(20.0, "main"), (21.0, "main"), (5.0, "topic"), (20.0, "work")]
        ):
            night(store, number, level, branch=branch, commit=f"{number + 10:x}" * 40)

    @pytest.mark.parametrize(
        ("reference", "point"),
        [
            ("previous", "bbbbbbbbbbbb, 2026-11-02"),
            ("main", "bbbbbbbbbbbb, 2026-11-02"),
            ("topic", "cccccccccccc, 2026-11-03"),
            ("aaaa", "aaaaaaaaaaaa, 2026-11-01"),
            ("b" * 40, "bbbbbbbbbbbb, 2026-11-02"),
            ("2026-11-02", "bbbbbbbbbbbb, 2026-11-02"),
            ("2026-11-02T01:00", "aaaaaaaaaaaa, 2026-11-01"),
            ("2027-01-01", "bbbbbbbbbbbb, 2026-11-02"),
            ("2026-W44", "aaaaaaaaaaaa, 2026-11-01"),
            ("2026-11-01..2026-11-04", "bbbbbbbbbbbb, aaaaaaaaaaaa, 2026-11-02"),
            ("aaaa..cccc", "bbbbbbbbbbbb, 2026-11-02"),
        ],
    )
    def test_references_choose_their_baseline(
        self, store: ResultsStore, reference: str, point: str
    ) -> None:
        (cell,) = judge_gate(store, reference, options=DECODE).cells
        assert cell.baseline is not None
        assert cell.baseline.point == point

    def test_the_judged_results_can_be_named_too(self, store: ResultsStore) -> None:
        gate = judge_gate(store, "main", candidate="topic", options=DECODE)
        assert (gate.candidate, gate.verdict) == ("cccccccccccc, 2026-11-03", Verdict.REGRESSED)

    def test_unknown_references_are_refused(self, store: ResultsStore) -> None:
        with pytest.raises(NotStoredError, match="it has the branches main, topic and results of"):
            judge_gate(store, "release", options=DECODE)
        with pytest.raises(WrongUseError, match="no date"):
            judge_gate(store, "2026-13-45", options=DECODE)
        for reference in ("", "--output=x", "a\nb"):
            with pytest.raises(WrongUseError, match="is no baseline"):
                judge_gate(store, reference)
        add(store, session(1.0, -1, commit="a" * 39 + "b"))
        with pytest.raises(WrongUseError, match="the beginning of several commits"):
            judge_gate(store, "aaaa", options=DECODE)


@pytest.mark.needs("git")
def test_git_finds_the_nearest_commit_with_results(
    store: ResultsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()

    def git(*arguments: str) -> str:
        author = ["-c", "user.name=x", "-c", "user.email=x@x"]
        command = ["git", "-C", str(folder), *author, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q", "-b", "trunk")
    commits = []
    for name in "abc":
        git("commit", "-q", "--allow-empty", "-m", name)
        commits.append(git("rev-parse", "HEAD"))
    night(store, 0, 20.0, commit=commits[0], branch="")
    night(store, 1, 20.0, commit="f" * 40, branch="")
    monkeypatch.chdir(folder)
    for reference in ("trunk", "HEAD~1"):
        (cell,) = judge_gate(store, reference, options=DECODE).cells
        assert cell.baseline is not None
        assert cell.baseline.point.startswith(commits[0][:12])


def test_formats_hold_against_hostile_names(store: ResultsStore) -> None:
    evil = "a|b`<img src=x onerror=alert(1)>*@everyone\x1b[31m\nx"
    for number, level in enumerate((20.0, 10.0)):
        night(store, number, level, container__model=evil)
    gate = judge_gate(store, "previous", options=DECODE)
    markdown = gate_formats.to_markdown(gate)
    assert markdown.startswith("### qnnfarm gate: regressed\n")
    for raw in ("<img", "@everyone", "\x1b", "`<"):
        assert raw not in markdown
    (row,) = [line for line in markdown.splitlines() if "regressed**" in line]
    assert row.replace("\\|", "").count("|") == 8
    suite = ET.fromstring(gate_formats.to_junit(gate))[0]  # noqa: S314
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
    document = json.loads(json.dumps(gate_formats.to_document(gate)))
    assert (document["verdict"], document["cells"][0]["verdict"]) == ("regressed", "regressed")
    assert gate_formats.to_lines(gate)[-1].endswith("regressed (1 regressed)")


def test_runs_beside_a_plan_are_left_out_on_request(store: ResultsStore) -> None:
    night(store, 0, 20.0, plan="nightly")
    night(store, 1, 14.0, plan="nightly")
    night(store, 2, 20.0)
    nightly = GateOptions(DECODE.metrics, plan="nightly")
    assert judge_gate(store, "previous", options=nightly).verdict is Verdict.REGRESSED
    assert judge_gate(store, "2026-11-01", options=DECODE).verdict is Verdict.NO_DIFFERENCE
    with pytest.raises(NotStoredError, match="it has no runs"):
        judge_gate(store, "previous", options=GateOptions(plan="weekly"))
