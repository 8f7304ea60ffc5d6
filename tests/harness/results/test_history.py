"""Histories of a store, their changes, and the alerts that come of them."""

import math
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select

from harness.errors import CorruptRunError, NotStoredError
from harness.results import alerts, history, schema
from harness.results.history import (
    Series,
    SeriesFilter,
    describe_drifts,
    find_series,
    iterate_series,
    read_series,
)
from harness.results.identity import Subject
from harness.results.metrics import Measurement, find_metric
from harness.results.records import Run, RunHead, RunMeans
from harness.results.statistics import changes
from harness.results.statistics.changes import Change
from harness.results.store import ResultsStore
from harness.results.turnover import find_turnover
from harness.words import percent
from tests.harness.results.places import Place, make_run, write_runs
from tests.reports.conftest import changed

DECODE = SeriesFilter(("decode_tokens_per_s",))
FIRST = datetime(2026, 1, 1, 22, 0, tzinfo=UTC)
WOBBLE = (0.0, 0.3, -0.2, 0.1, -0.4, 0.2, -0.1)
Fill = Callable[..., None]


@pytest.fixture
def fill(store: ResultsStore) -> Fill:
    """Writes nights of two sessions each, about a level."""

    def write(levels: Sequence[float], *, start: int = 0, **changes: object) -> None:
        write_runs(store, made(levels, start, changes))

    def made(levels: Sequence[float], start: int, changes: dict[str, object]) -> Iterator[Run]:
        for night, level in enumerate(levels, start):
            for session in range(2):
                value = level + WOBBLE[(3 * night + session) % len(WOBBLE)]
                run = make_run(
                    status="done",
                    created_at=FIRST + timedelta(days=night, hours=3 * session),
                    session=session,
                    measurements=(
                        Measurement(metric="decode_tokens_per_s", value=1.0, is_warmup=True),
                        Measurement(metric="decode_tokens_per_s", value=value),
                        Measurement(metric="decode_tokens_per_s", value=value, repetition=1),
                    ),
                )
                commit = f"{night:02d}" * 20
                yield changed(run, **{"provenance__git_commit": commit, **changes})

    return write


def decode(store: ResultsStore) -> Series:
    (series,) = read_series(store, DECODE)
    return series


def test_a_loss_has_its_night_and_commits(store: ResultsStore, fill: Fill) -> None:
    fill([50.0] * 20 + [40.0] * 3)
    series = decode(store)
    assert [len(night.sessions) for night in series.nights] == [2] * 23
    (change,) = series.changes
    assert (change.night, change.found, change.is_loss) == (20, 21, True)
    assert series.commits(change) == ("19" * 20, "20" * 20)
    assert [level[:2] for level in series.levels()] == [(0, 19), (20, 22)]
    assert series.levels()[1][2] == pytest.approx(40, abs=0.5)
    assert "tiny_llama W8A16" in series.name
    assert "SM8750 emulator" in series.name
    assert "SM8750 emulator" in series.title
    assert "pp64+tg16" in series.name


def test_containers_and_settings_are_no_identity_and_a_change_names_them(
    store: ResultsStore, fill: Fill
) -> None:
    fill([50.0] * 20)
    settings = {**make_run().workload.sampler, "flash_attn": True, "seed": 7}
    fill(
        [40.0] * 3, start=20, workload__sampler=settings, workload__runner="genie-t2t-run",
        concurrent_sessions=3, container__sha256="b" * 64,
    )  # fmt: skip
    series = decode(store)
    (change,) = series.changes
    assert change.night == 20
    assert series.differences(change) == (
        f"container {'a' * 12} → {'b' * 12}",
        "flash_attn none → True",
        "runner genie_t2t_run.py → genie-t2t-run",
        "seed 42 → 7",
        "sessions at once one → several",
    )


def test_runs_that_are_not_comparable_make_another_series(store: ResultsStore, fill: Fill) -> None:
    fill([50.0] * 2)
    fill([60.0] * 2, device__emulator=False)
    fill([70.0] * 2, container__precision="W4A16")
    fill([80.0] * 2, workload__prompt_tokens=32)
    fill([50.0] * 2, label="head/phone/bench#1")
    fill([50.0] * 2, label="base/phone/bench#1")
    assert len(read_series(store, DECODE)) == 6


ON_MAIN: dict[str, object] = {"provenance__git_branch": "main"}


def commits_apart(store: ResultsStore) -> list[str]:
    return [(night.commit or "")[:2] for night in decode(store).apart]


@pytest.mark.parametrize("branch", [None, "main"])
def test_commits_of_a_bisection_stay_out_of_the_history(
    store: ResultsStore, fill: Fill, branch: str | None
) -> None:
    """They run again after the loss, without a branch (detached HEAD) or with that of before."""
    fill([50.0] * 12 + [40.0] * 3, **ON_MAIN)
    (alert,) = alerts.review_new(store)
    for night, (commit, level) in enumerate(((3, 50.0), (9, 50.0), (11, 50.0), (12, 40.0)), 15):
        again: dict[str, object] = {"provenance__git_commit": f"{commit:02d}" * 20}
        fill([level], start=night, **again, provenance__git_branch=branch)
    fill([40.2] * 2, start=22, **ON_MAIN)
    assert commits_apart(store) == ["03", "09", "11", "12"]
    assert len(decode(store).nights) == 17
    assert alerts.review_new(store) == ()
    (still,) = alerts.list_alerts(store)
    assert (still.id, still.state, still.bad_commit) == (alert.id, "open", "12" * 20)


def test_results_from_before_branches_were_known_stay_in_the_history(
    store: ResultsStore, fill: Fill
) -> None:
    fill([50.0] * 12)
    fill([50.0] * 3, start=12, **ON_MAIN)
    fill([50.0], start=15)
    assert commits_apart(store) == ["15"]
    assert len(decode(store).nights) == 15


@pytest.mark.needs("git")
def test_git_tells_which_commits_are_older(
    store: ResultsStore, fill: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a bisection may never have run before, and a branch may be reset."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
        return subprocess.check_output([*command, *arguments], text=True).strip()

    def measure(commit: str) -> None:
        night = len(store.heads()) // 2
        fill([50.0], start=night, provenance__git_commit=commit, **ON_MAIN)

    git("init", "-q", "-b", "main")
    commits = []
    for number in range(4):
        git("commit", "-q", "--allow-empty", "-m", f"{number}")
        commits.append(git("rev-parse", "HEAD"))
    monkeypatch.chdir(tmp_path)
    for commit in (commits[0], commits[3], commits[1], "f" * 40):
        measure(commit)
    assert [night.commit for night in decode(store).apart] == [commits[1]]
    git("reset", "-q", "--hard", commits[1])
    measure(commits[1])
    assert [night.commit for night in decode(store).apart] == []


def test_what_ends_and_what_begins_is_news(store: ResultsStore, fill: Fill) -> None:
    def turnover() -> tuple[str, ...]:
        return find_turnover(read_series(store, DECODE))

    head: dict[str, object] = {"label": "head/phone/bench#1"}
    smaller = {**head, "container__precision": "W4A16"}
    fill([50.0] * 20, **head)
    fill([30.0] * 17, device__soc="SM8650", device__model="older")
    assert [line.rpartition(":")[2] for line in turnover()] == [" no results since 2026-01-17"]
    fill([60.0], start=20, **smaller)
    ended, left = turnover()
    assert ended.startswith("head: tiny_llama W8A16, AR 1, 32, CL 192, pp64+tg16 on SM8750 ")
    assert ended.endswith(
        ": no results since 2026-01-20; since 2026-01-21 with precision W8A16 → W4A16"
    )
    assert left.endswith("older): no results since 2026-01-17")
    fill([60.0] * 14, start=21, **smaller)
    assert turnover() == ()
    fill([60.0], start=35, labels={"team": "camera"})
    assert [line.rpartition(":")[2] for line in turnover()] == [" first results on 2026-02-05"]


def test_sides_of_comparisons_and_unfinished_runs_have_no_history(
    store: ResultsStore, fill: Fill
) -> None:
    fill([50.0] * 2, label="A")
    store.write_run(make_run(measurements=(Measurement(metric="decode_tokens_per_s", value=1.0),)))
    assert read_series(store, DECODE) == ()


def test_filters_choose_runs(store: ResultsStore, fill: Fill) -> None:
    fill([50.0] * 4)
    assert len(decode(store).nights) == 4
    since = SeriesFilter(DECODE.metrics, since=FIRST + timedelta(days=1, hours=-1))
    assert len(read_series(store, since)[0].nights) == 3
    late = SeriesFilter(DECODE.metrics, since=FIRST + timedelta(days=9))
    assert not read_series(store, late)
    assert read_series(store, SeriesFilter(DECODE.metrics, device="QNNFARM virt"))
    assert not read_series(store, SeriesFilter(DECODE.metrics, device="pixel%"))
    assert not read_series(store, SeriesFilter(DECODE.metrics, model="other"))
    assert not read_series(store, SeriesFilter(DECODE.metrics, branch="main"))


def test_a_part_of_a_history_has_the_changes_of_the_whole(store: ResultsStore, fill: Fill) -> None:
    fill([50.0] * 20 + [40.0] * 6, device__serial="a")
    fill([50.0] * 3, start=10, device__serial="b")
    (whole,) = decode(store).changes
    for since in (None, FIRST + timedelta(days=17, hours=-1)):
        (part,) = read_series(store, SeriesFilter(DECODE.metrics, device="B", since=since))
        (change,) = part.changes
        assert change.ratio == whole.ratio
        assert part.commits(change) == ("19" * 20, "20" * 20)
    assert len(part.nights) == 9


def test_a_loss_is_told_once_and_fixed_by_its_recovery(store: ResultsStore, fill: Fill) -> None:
    fill([50.0] * 20 + [40.0] * 2)
    (alert,) = alerts.review(store, read_series(store, DECODE))
    assert alert.state == "open"
    assert alert.bad_commit == "20" * 20
    assert alerts.list_untold(store) == (alert,)
    alerts.mark_told(store, [alert.id])

    fill([40.0] * 6, start=22)
    assert alerts.review(store, read_series(store, DECODE)) == ()
    assert alerts.list_untold(store) == ()

    fill([50.0] * 4, start=28)
    assert alerts.review(store, read_series(store, DECODE)) == ()
    (settled,) = alerts.list_alerts(store)
    assert (settled.state, settled.note) == ("fixed", f"recovered on 2026-01-29 at {'28' * 6}")


def judged(levels: Iterable[float]) -> Series:
    """A series of one run each night."""
    runs = [
        changed(
            make_run(status="done", id=f"{night:032x}", created_at=FIRST + timedelta(days=night)),
            measurements=(Measurement(metric="decode_tokens_per_s", value=level),),
            provenance__git_commit=f"{night:02d}" * 20,
        )
        for night, level in enumerate(levels)
    ]
    heads = [RunHead.of(run, Subject.of(run).id) for run in runs]
    (series,) = find_series(map(RunMeans.of, runs), heads, DECODE.metrics)
    return series


@pytest.fixture(scope="module")
def flat() -> Series:
    """Thirty nights at one level, to which tests give the changes that are judged."""
    return judged([50.0] * 30)


def test_an_alert_that_the_series_refutes_is_fixed(store: ResultsStore, flat: Series) -> None:
    change = Change(12, 13, 0.95, is_loss=True)
    (alert,) = alerts.review(store, [replace(flat, changes=(change,))])
    assert alert.state == "open"
    later = replace(flat, refuted=(replace(change, refuted=16),))
    assert alerts.review(store, [later]) == ()
    (settled,) = alerts.list_alerts(store)
    note = "refuted: back at the old level by itself, 2026-01-17"
    assert (settled.state, settled.note) == ("fixed", note)
    assert alerts.assess([later], []) == ()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_loss_whose_recovery_is_refuted_is_open_again(
    store: ResultsStore, flat: Series, *, by_hand: bool
) -> None:
    """The series stands at the new level; what somebody settled stays settled."""
    loss, gain = Change(8, 9, 0.95, is_loss=True), Change(13, 15, 1.05, is_loss=False)
    (alert,) = alerts.review(store, [replace(flat, changes=(loss,))])
    alerts.mark_told(store, [alert.id])
    if by_hand:
        alerts.set_state(store, [alert.id], "fixed", note="a new fan")
    alerts.review(store, [replace(flat, changes=(loss, gain))])
    assert alerts.list_alerts(store)[0].state == "fixed"
    refuted = replace(flat, changes=(loss,), refuted=(replace(gain, refuted=18),))
    told = ("fixed", "a new fan") if by_hand else ("open", "its recovery was refuted, 2026-01-19")
    for _ in range(2):
        assert alerts.review(store, [refuted]) == ()
        (again,) = alerts.list_alerts(store)
        assert (again.state, again.note) == told
        assert alerts.list_untold(store) == ()


def test_each_of_two_losses_has_its_alert(store: ResultsStore, flat: Series) -> None:
    first, second = Change(12, 13, 0.9, is_loss=True), Change(14, 15, 0.6, is_loss=True)
    (one,) = alerts.review(store, [replace(flat, changes=(first,))])
    both = replace(flat, changes=(first, second))
    (other,) = alerts.review(store, [both])
    assert (one.loss, other.loss) == ("-10.0%", "-40.0%")
    found = alerts.assess([both], alerts.list_alerts(store))
    assert {alert.change: alert.id for alert in found} == {
        first: one.id, second: other.id
    }  # fmt: skip


def test_a_refuted_change_leaves_the_alert_of_another_loss_alone(
    store: ResultsStore, flat: Series
) -> None:
    series = replace(flat, changes=(Change(12, 13, 0.9, is_loss=True),))
    (alert,) = alerts.review(store, [series])
    refuted = Change(14, 15, 0.97, is_loss=True, refuted=18)
    alerts.review(store, [replace(series, refuted=(refuted,))])
    assert alerts.list_alerts(store) == (alert,)


def test_an_alert_has_the_facts_of_its_history_and_its_own_state(
    store: ResultsStore, flat: Series
) -> None:
    loss = Change(12, 13, 0.9, is_loss=True)
    (alert,) = alerts.review(store, [replace(flat, changes=(loss,))])
    alerts.set_state(store, [alert.id], "acknowledged", note="AN-12")
    moved = replace(flat, changes=(replace(loss, night=11, ratio=0.92),))
    assert alerts.review(store, [moved]) == ()
    (later,) = alerts.list_alerts(store)
    assert (later.id, later.state, later.note) == (alert.id, "acknowledged", "AN-12")
    assert (later.loss, later.began_at) == ("-8.0%", flat.nights[11].at)
    assert later.bad_commit == flat.nights[11].commit


def test_a_loss_that_the_database_holds_no_more_is_open_until_it_recovers(
    store: ResultsStore, flat: Series
) -> None:
    (alert,) = alerts.review(store, [replace(flat, changes=(Change(12, 13, 0.9, is_loss=True),))])
    pruned = replace(flat, nights=flat.nights[15:])
    alerts.review(store, [pruned])
    assert alerts.list_alerts(store) == (alert,)
    alerts.review(store, [replace(pruned, changes=(Change(8, 9, 1.1, is_loss=False),))])
    (settled,) = alerts.list_alerts(store)
    assert (settled.state, settled.ratio) == ("fixed", 0.9)
    assert settled.note.startswith("recovered on 2026-01-24")


def test_a_change_has_the_ratio_of_its_levels_with_each_phone_against_itself(
    store: ResultsStore, fill: Fill
) -> None:
    """The faster phone measured most of the old nights, and the slower one all of the new ones."""
    fill([50.0] * 20 + [45.0] * 4, device__serial="a")
    fill([60.0] * 16, device__serial="b")
    (change,) = decode(store).changes
    assert change.ratio == pytest.approx(0.9, abs=0.01)


def test_only_subjects_with_news_are_read_and_reviewed(
    place: Place, store: ResultsStore, fill: Fill
) -> None:
    fill([50.0] * 20)
    fill([50.0] * 20, labels={"team": "camera"})
    assert alerts.review_new(store) == ()
    unreadable = "UPDATE runs SET cl = -1 WHERE CAST(labels AS TEXT) LIKE '%camera%'"
    place.run(unreadable)
    assert alerts.review_new(store) == ()
    fill([40.0] * 3, start=20)
    assert [alert.metric.key for alert in alerts.review_new(store)] == ["decode_tokens_per_s"]
    fill([40.0], start=23, labels={"team": "camera"})
    place.run(unreadable)
    with pytest.raises(CorruptRunError, match="cl"):
        alerts.review_new(store)


def test_a_run_that_is_written_while_histories_are_read_is_of_the_next_time(
    store: ResultsStore, fill: Fill
) -> None:
    fill([50.0] * 3)
    heads = store.heads()
    fill([50.0] * 2, start=3)
    (series,) = find_series(store.measured(), heads, DECODE.metrics)
    assert len(series.nights) == 3


def test_other_code_judges_all_histories_anew(
    store: ResultsStore, fill: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout has the same version before and after a pull."""
    fill([50.0] * 12)

    def marks() -> dict[str, str]:
        return history.mark_subjects(history.PlacedRuns.of(store.heads()))

    before, whole = marks(), history.mark_store(store)
    assert (marks(), history.mark_store(store)) == (before, whole)
    other = tmp_path / "changes.py"
    other.write_text("THRESHOLDS = (3,)")
    monkeypatch.setattr(changes, "__file__", str(other))
    assert set(marks().values()).isdisjoint(before.values())
    assert history.mark_store(store) != whole


def test_the_mark_of_a_store_changes_with_runs_and_with_the_branches_of_the_repository(
    place: Place, store: ResultsStore, fill: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What says which runs are strays, or of which night, may change later."""
    monkeypatch.chdir(tmp_path)
    marks = [history.mark_store(store)]
    fill([50.0] * 2)
    marks.append(history.mark_store(store))
    assert history.mark_store(store) == marks[-1]
    place.run("UPDATE runs SET git_branch = 'other'")
    marks.append(history.mark_store(store))
    run_git = partial(subprocess.run, check=True, cwd=tmp_path, capture_output=True)
    run_git(["git", "init", "-q"])
    assert history.mark_store(store) == marks[-1]
    commit = ["commit", "-q", "--allow-empty", "-m", "one"]
    run_git(["git", "-c", "user.name=a", "-c", "user.email=a@b", *commit])
    marks.append(history.mark_store(store))
    run_git(["git", "branch", "other"])
    marks.append(history.mark_store(store))
    assert len(set(marks)) == len(marks)


def test_histories_are_the_same_some_subjects_at_a_time(
    store: ResultsStore, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    for team in range(3):
        fill([50.0] * 12 + [45.0 - team] * 3, labels={"team": str(team)})
    whole = read_series(store, DECODE)
    monkeypatch.setattr(history, "_SUBJECTS_AT_ONCE", 1)
    assert [len(some) for some in iterate_series(store, DECODE)] == [1, 1, 1]
    assert {one.id: one for one in read_series(store, DECODE)} == {one.id: one for one in whole}


def test_a_settled_loss_stays_settled(store: ResultsStore, flat: Series) -> None:
    loss = Change(20, 21, 0.8, is_loss=True)
    (alert,) = alerts.review(store, [replace(flat, changes=(loss,))])
    states: tuple[alerts.AlertState, ...] = ("acknowledged", "expected", "fixed")
    for state in states:
        (settled,) = alerts.set_state(store, [alert.id[:4]], state, note="the new Genie")
        assert (settled.id, settled.state, settled.note) == (alert.id, state, "the new Genie")
        alerts.review(store, [replace(flat, changes=(replace(loss, ratio=0.79),))])
        (kept,) = alerts.list_alerts(store)
        assert (kept.id, kept.state) == (alert.id, state)


def test_alerts_of_one_cause_are_one_group(store: ResultsStore, flat: Series) -> None:
    lost = replace(flat, changes=(Change(20, 21, 0.8, is_loss=True),))
    (one,) = alerts.review(store, [lost])
    (other,) = alerts.review(store, [replace(lost, subject="another")])
    (group,) = alerts.group_alerts([one, other])
    assert {alert.id for alert in group} == {one.id, other.id}


@pytest.mark.parametrize(
    ("change", "is_news"),
    [
        ({}, False),  # the same metric of another subject, at the same commit
        ({"began_at": FIRST + timedelta(days=1), "bad_commit": "c2"}, True),
        ({"metric": find_metric("ttft_s"), "series": "other-ttft_s"}, True),
        ({"metric": find_metric("ttft_s"), "series": "one-ttft_s", "ratio": 1.2}, False),
        ({"metric": find_metric("ttft_s"), "series": "one-ttft_s", "ratio": 4.0}, False),
        (
            {
                "metric": find_metric("ttft_s"), "series": "one-ttft_s", "bad_commit": "c2",
                "began_at": FIRST + timedelta(days=1),
            },
            False,
        ),
        ({"series": "one-decode_tokens_per_s", "began_at": FIRST + timedelta(days=1)}, True),
        ({"ratio": 0.5}, True),
        ({"told_at": FIRST}, False),
    ],
)  # fmt: skip
def test_what_was_told_explains_its_like_and_hides_nothing_else(
    change: dict[str, object], is_news: bool
) -> None:
    told = alerts.Alert(
        id="a", series="one-decode_tokens_per_s", metric=find_metric("decode_tokens_per_s"),
        name="", state="open", began_at=FIRST, found_at=FIRST, ratio=0.8, good_commit="c0",
        bad_commit="c1", note="", changed_at=FIRST, told_at=FIRST,
    )  # fmt: skip
    later = replace(told, id="b", series="other-decode_tokens_per_s", told_at=None)
    later = replace(later, **change)  # type: ignore[arg-type]
    (group,) = [group for group in alerts.group_alerts([told, later]) if later in group]
    assert alerts.is_news(later, group) is is_news
    assert not alerts.is_news(told, group)


def test_an_unknown_alert_is_refused(store: ResultsStore) -> None:
    with pytest.raises(NotStoredError, match="none has that id"):
        alerts.set_state(store, ["abc"], "fixed")


def test_a_loss_of_one_phone_is_an_alert_of_that_phone_with_its_build(
    store: ResultsStore, fill: Fill
) -> None:
    """The others go on as before, and vote the loss down as one of all."""
    before: dict[str, object] = {"device__build_fingerprint": "X"}
    for serial, level in (("P1", 50.0), ("P2", 53.0), ("P3", 48.0)):
        fill([level] * 20, device__serial=serial, **before)
        build = {"device__build_fingerprint": "Y"} if serial == "P3" else before
        now = 0.8 * level if serial == "P3" else level
        fill([now] * 4, start=20, device__serial=serial, **build)
    (alert,) = alerts.review_new(store)
    assert alert.name.startswith("P3 alone: tiny_llama W8A16")
    assert alert.devices == ("P3",)
    assert alert.ratio == pytest.approx(0.8, abs=0.01)
    assert alert.note == "build X → Y"
    assert alert.found_at - alert.began_at < timedelta(days=2)
    (change,) = decode(store).changes
    assert change.devices == ("P3",)
    assert decode(store).differences(change) == ("build X → Y",)
    fill([48.0] * 4, start=24, device__serial="P3", **before)
    fill([50.0] * 4, start=24, device__serial="P1", **before)
    assert alerts.review_new(store) == ()
    assert alerts.list_alerts(store)[0].state == "fixed"


def test_a_loss_that_older_results_bring_in_is_told_from_a_new_one(
    store: ResultsStore, fill: Fill
) -> None:
    """Another phone's results come in late, with a loss of the day before and one of old."""
    fill([50.0] * 30)
    assert alerts.review_new(store) == ()
    fill([50.0] * 10 + [40.0] * 10, device__soc="SM8650", device__serial="B")
    fill([50.0] * 28 + [40.0] * 2, device__soc="SM8550", device__serial="C")
    fill([40.0] * 2, start=30)
    found = {alert.began_at: alert for alert in alerts.review_new(store)}
    assert {at: one.backfilled for at, one in found.items()} == {
        FIRST + timedelta(days=10): True,
        FIRST + timedelta(days=28): False,
        FIRST + timedelta(days=30): False,
    }
    assert found[FIRST + timedelta(days=10)].note == "in older results"
    fill([40.0] * 3, start=32)
    assert alerts.review_new(store) == ()
    assert {one.id: one.backfilled for one in alerts.list_alerts(store)} == {
        one.id: one.backfilled for one in found.values()
    }


def test_a_wrong_clock_makes_no_loss_an_old_one(store: ResultsStore, fill: Fill) -> None:
    fill([50.0] * 20)
    fill([50.0], device__serial="B", created_at=datetime(2090, 1, 1, tzinfo=UTC))
    assert alerts.review_new(store) == ()
    with store.database.reading() as connection:
        until = connection.scalars(select(schema.reviews.c.until)).all()
    assert max(until) < datetime(2090, 1, 1, tzinfo=UTC)


def test_the_words_of_a_label_are_no_devices(store: ResultsStore, fill: Fill) -> None:
    label = "P3 alone: nightly/phone/bench#1"
    fill([50.0] * 20 + [40.0] * 3, label=label)
    (alert,) = alerts.review_new(store)
    assert alert.name.startswith("P3 alone: ")
    assert (alert.devices, alert.scope) == ((), "")
    fill([50.0] * 4, start=23, label=label)
    assert alerts.review_new(store) == ()
    assert alerts.list_alerts(store)[0].state == "fixed"


def test_a_swapped_phone_is_named_and_is_no_loss(store: ResultsStore, fill: Fill) -> None:
    """With one phone, its level cannot be told from that of the code; later losses can."""
    fill([50.0] * 20, device__serial="P1")
    fill([46.0] * 12, start=20, device__serial="P2")
    series = decode(store)
    assert (series.changes, series.swaps) == ((), {20: "P1 → P2"})
    assert [level[:2] for level in series.levels()] == [(0, 19), (20, 31)]
    assert find_turnover([series])[0].endswith(
        "since 2026-01-21 on P1 → P2, whose level is its own"
    )
    fill([42.0] * 3, start=32, device__serial="P2")
    (change,) = decode(store).changes
    assert (change.night, change.is_loss) == (32, True)
    assert change.ratio == pytest.approx(42 / 46, abs=0.01)


@pytest.mark.parametrize("heat", [0.0, 12.0])
def test_nights_that_began_hot_are_no_loss(store: ResultsStore, fill: Fill, heat: float) -> None:
    for night in range(40):
        is_hot = night in {3, 16, 17, 18, 19, 37, 38, 39}
        celsius = 35.0 + night % 3 + heat * is_hot
        gate = {"name": "thermal_gate", "outcome": "not-met", "after": celsius}
        fill([45.0 if is_hot else 50.0], start=night, conditions=(gate,))
    series = decode(store)
    losses = [one for one in (*series.changes, *series.refuted) if one.is_loss]
    assert bool(losses) == (heat == 0)


def test_phones_that_take_turns_are_not_swapped(store: ResultsStore, fill: Fill) -> None:
    for night in range(12):
        fill([50.0], start=night, device__serial=f"P{night % 3}")
    assert decode(store).swaps == {}


@pytest.mark.parametrize("lost", [0.0, 0.1])
def test_a_slow_loss_is_told_whole(lost: float) -> None:
    """60 nights of 0.17 % each after 60 of one level, at noise of 2 %."""
    random = np.random.default_rng(2)
    part = np.clip((np.arange(130) - 60) / 60, 0, 1)
    levels = 50 * np.exp(np.log1p(-lost) * part + random.normal(0, 0.014, 130))
    series = judged(levels.tolist())
    month, quarter = series.drifts
    assert (month.days, quarter.days) == (30, 90)
    assert math.log(quarter.ratio) == pytest.approx(math.log1p(-lost), abs=quarter.half)
    assert month.is_untold <= bool(lost)
    (part_of,) = series.since(series.nights[-20].at).drifts[1:]
    assert part_of == quarter
    told = describe_drifts([series])
    assert [line.split(": ")[1].split(" ±")[0] for line in told] == (
        [f"Decode {percent(quarter.ratio - 1)}"] if lost else []
    )
