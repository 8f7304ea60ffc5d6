"""The nightly job with steps by hand: which night it is, what is told, and what stays."""

import json
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from filelock import FileLock

from harness.errors import HostFileError, NightlyBusyError, NotificationError, StoreUnavailableError
from harness.plans.builds import ContainerBuild
from harness.plans.plan_file import NightlyEntry, Plan
from harness.pool.config import ReceiverConfig
from harness.pool.notifications import Notification
from harness.results.store import ResultsStore
from plugins.nightly.archive import INDEX, RECORD, Archive, night_name
from plugins.nightly.job import Measured, NightlyJob, Reported
from plugins.nightly.night import Cells, Night, NightFailure, Regression, SeriesCounts
from plugins.nightly.steps import PlanSteps
from tests.reports.conftest import Sample, changed

PLAN = {"name": "lab", "workloads": [{"kind": "command", "command": ["true"]}]}
EVENING = datetime(2026, 11, 22, 22, 30, tzinfo=UTC)
WELL = Measured(Cells(done=3))
SLOWER = Regression(
    id="17",
    cause="17",
    metric="decode_tokens_per_s",
    series="my-llama W4A16 on SM8750",
    change=-0.082,
    since="2026-11-22",
    commits=("a" * 40, "b" * 40),
)
LOST = NightFailure(cell="head/phone/bench", error="DeviceLostError", reason="it went away")


class Lab:
    """A job whose steps give what a test says; it keeps what was done, and what was sent."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        self.time = EVENING
        self.builds: Sequence[ContainerBuild] = [ContainerBuild("head", "c" * 64)]
        self.measured: Measured | BaseException = WELL
        self.regressions: tuple[Regression, ...] = ()
        self.turnover: tuple[str, ...] = ()
        self.series = SeriesCounts()
        self.settled: set[str] = set()
        self.done: list[str] = []
        self.sent: list[Notification] = []
        self.deaf = False
        settings.setdefault("tell", [{"command": ["chat"]}])
        self.settings = NightlyEntry.model_validate(settings)

    def run(self, *, again: bool = False) -> Night:
        archive = Archive(self.folder, "lab")
        job = NightlyJob(archive, self.settings, self, self.start, lambda: self.time, self.send)
        return job.run(again=again)

    def next_day(self, days: int = 1) -> None:
        self.time += timedelta(days=days)

    def start(self, name: str) -> Night:
        return Night(plan="lab", name=name, began_at=self.time, host="lab1", commit="d" * 40)

    def build(self) -> Sequence[ContainerBuild]:
        return self.builds

    def measure(
        self, *, fresh: bool, skipped: Collection[str], on_begin: Callable[[str], None]
    ) -> Measured:
        self.done.append("fresh" if fresh else "resumed")
        self.done += [f"without {label}" for label in skipped]
        on_begin("e" * 32)
        if isinstance(self.measured, BaseException):
            raise self.measured
        return self.measured

    def judge(self) -> tuple[Regression, ...]:
        return tuple(
            each.model_copy(update={"is_new": each.cause not in self.settled})
            for each in self.regressions
        )

    def settle(self, night: Night) -> None:
        self.settled |= {each.cause for each in night.regressions}

    def write_report(self, path: Path, began_at: datetime) -> Reported:
        path.write_text("report")
        assert began_at == self.time
        return Reported(self.turnover, self.series)

    def send(self, receiver: ReceiverConfig, notification: Notification) -> None:
        if self.deaf:
            raise NotificationError(receiver.command[0], "it is down")
        self.sent.append(notification)

    @property
    def texts(self) -> list[str]:
        return [notification.text for notification in self.sent]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "nights")


@pytest.mark.parametrize(
    ("moment", "name"),
    [
        ("2026-11-22T12:00", "2026-11-22"),
        ("2026-11-22T22:30", "2026-11-22"),
        ("2026-11-23T03:00", "2026-11-22"),
        ("2026-11-23T11:59", "2026-11-22"),
        ("2027-01-01T00:10", "2026-12-31"),
    ],
)
def test_a_night_lasts_from_noon_to_noon(moment: str, name: str) -> None:
    assert night_name(datetime.fromisoformat(moment)) == name


@pytest.mark.parametrize(
    ("series", "word", "text"),
    [
        ((4, 0, 0, 0, 3), "good", "all is well in 4 series"),
        ((4, 2, 0, 0, 0), "good", "all is well in 4 series, no verdict on 2 more"),
        (
            (4, 2, 1, 0, 0), "good",
            "all is well in 4 series, no verdict on 2 more (1 worse than before)",
        ),
        ((0, 2, 1, 3, 0), "ran", "no verdict on any of 2 series yet (1 worse than before)"),
        ((0, 0, 0, 0, 1), "ran", "nothing was checked"),
        ((0, 0, 0, 1, 1), "good", "all is well"),
    ],
)  # fmt: skip
def test_a_good_night_says_how_much_was_judged(
    lab: Lab, series: tuple[int, int, int, int, int], word: str, text: str
) -> None:
    names = ("judged", "unjudged", "suspected", "checked", "unchecked")
    lab.series = SeriesCounts(**dict(zip(names, series, strict=True)))
    night, text = lab.run(), f"{text}, 3 cells done"
    assert (night.verdict, night.text, night.summary) == ("good", text, f"{word}: {text}")
    page = (lab.folder / INDEX).read_text()
    assert text in page
    level = 'data-level="good"' if word == "good" else 'data-level="none"'
    assert f"{level} aria-label" in page
    assert f"{word.capitalize()}, 2026-11-22" in page


def test_the_series_of_a_night_are_counted_by_their_verdicts(tmp_path: Path) -> None:
    """A speed of many nights, a perplexity of four that got worse, and what another night had."""
    sample, db = Sample("SM8750", emulator=False), tmp_path / "results.db"
    made = [
        (night, "bench", {"decode_tokens_per_s": [50.0, 50 + night % 3 / 10, 50.2]})
        for night in range(15)
    ]
    made += [(night, "perplexity", {"perplexity": [20.0]}) for night in range(11, 14)]
    made += [(14, "perplexity", {"perplexity": [20.76]})]
    other = changed(sample.run(0, "generate", {"decode_tokens_per_s": [40.0]}), label="old")
    with ResultsStore.open(db) as store:
        store.write_run(other)
        for number, (night, kind, values) in enumerate(made, 1):
            at = other.created_at + timedelta(days=night + 1)
            store.write_run(changed(sample.run(number, kind, values), created_at=at))
    steps = PlanSteps(Plan.model_validate(PLAN), tmp_path / "plan.yaml", str(db))
    reported = steps.write_report(tmp_path / "report.html", at - timedelta(hours=1))
    assert reported is not None
    assert reported.series == SeriesCounts(judged=1, unjudged=1, suspected=1, unchecked=2)


def test_a_night_that_is_well_leaves_a_report_and_tells_ended_histories_alone(lab: Lab) -> None:
    lab.turnover = ("old: first results on 2026-11-20",)
    night = lab.run()
    assert (night.verdict, night.exit_code, night.text) == ("good", 0, "all is well, 3 cells done")
    assert (lab.folder / "2026-11-22" / "report.html").read_text() == "report"
    page = (lab.folder / INDEX).read_text()
    assert '<a href="2026-11-22/report.html">' in page
    assert "dddddddddd" in page
    assert lab.sent == []
    lab.turnover = ("head on SM8750: no results since 2026-11-20", *lab.turnover)
    for _ in range(2):
        lab.next_day()
        assert lab.run().verdict == "good"
    assert lab.texts == ["lab 2026-11-23: head on SM8750: no results since 2026-11-20"]


def test_a_night_that_is_over_is_not_repeated_unless_asked_for(lab: Lab) -> None:
    lab.run()
    lab.time += timedelta(hours=3)
    assert lab.run().began_at == EVENING
    assert lab.done == ["fresh"]
    assert lab.run(again=True).name == "2026-11-22.2"
    assert lab.run(again=True).name == "2026-11-22.3"
    assert lab.run().name == "2026-11-22.3"
    lab.next_day()
    assert lab.run().name == "2026-11-23"
    assert lab.done == ["fresh"] * 4


def test_a_night_that_was_cut_off_goes_on_in_one_process_at_a_time(lab: Lab) -> None:
    lab.measured = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    with FileLock(lab.folder / ".lock"), pytest.raises(NightlyBusyError, match="wait for it"):
        lab.run()
    lab.measured = WELL
    assert lab.run(again=True).name == "2026-11-22", "it is not over, so there is none to repeat"
    assert lab.done == ["fresh", "resumed"]


def test_a_regression_is_told_once_while_it_lasts(lab: Lab) -> None:
    codes = []
    for number in range(6):
        lab.regressions = (SLOWER,) if 2 <= number < 5 else ()
        codes.append(lab.run().exit_code)
        lab.next_day()
    assert codes == [0, 0, 1, 1, 1, 0]
    (told,) = lab.texts
    assert told == (
        "lab 2026-11-24: new regression: decode_tokens_per_s of my-llama W4A16 on SM8750 -8.2% "
        "since 2026-11-22 (aaaaaaaaaa..bbbbbbbbbb)"
    )


def test_series_of_one_cause_are_one_piece_of_news(lab: Lab) -> None:
    prefill = SLOWER.model_copy(update={"id": "18", "metric": "prefill_tokens_per_s"})
    lab.regressions = (SLOWER,)
    assert lab.run().text.startswith("new regression: decode_tokens_per_s of")
    lab.next_day()
    lab.regressions = (SLOWER, prefill)
    assert lab.run().text == "1 regression still open"
    assert len(lab.sent) == 1
    lab.settled.clear()
    lab.next_day()
    assert lab.run().text.endswith("(aaaaaaaaaa..bbbbbbbbbb) and 1 more with it")


def test_a_failure_is_told_once_while_it_lasts(lab: Lab) -> None:
    for number in range(5):
        failures = (LOST.model_copy(update={"reason": f"for the {number}. time"}),)
        lab.measured = WELL if number == 3 else Measured(Cells(done=2, failed=1), failures)
        lab.run()
        lab.next_day()
    assert [text.partition(":")[0] for text in lab.texts] == ["lab 2026-11-22", "lab 2026-11-26"]


def test_a_night_without_an_answer_is_told_and_tried_again(lab: Lab) -> None:
    lab.regressions = (SLOWER,)
    lab.run()
    lab.next_day()
    lab.measured = StoreUnavailableError("results.db", "the disk is full")
    assert [lab.run().exit_code for _ in range(2)] == [2, 2]
    assert [text for text in lab.texts if "no answer" in text] == [lab.texts[1]], "same reason"
    lab.measured = WELL
    assert lab.run().verdict == "bad"
    assert lab.done[-2:] == ["resumed", "resumed"]
    assert len(lab.sent) == 2, "the regression was told the night before the last"


def test_a_container_that_cannot_be_built_is_reported_and_skipped(lab: Lab) -> None:
    lab.builds = [
        ContainerBuild("base", "c" * 64, built=True),
        ContainerBuild("head", "c" * 64, built=True, error="no such checkpoint"),
    ]
    night = lab.run()
    assert lab.done == ["fresh", "without head"]
    assert night.verdict == "bad"
    assert lab.texts == ["lab 2026-11-22: 1 not measured: build head: no such checkpoint"]
    assert [container.label for container in night.containers] == ["base"]


def test_no_answer_is_said_once_and_a_bug_is_told_before_it_shows(lab: Lab) -> None:
    lab.measured = Measured(Cells(failed=1), (LOST,), "no device measured anything")
    night = lab.run()
    assert night.summary == "no answer: no device measured anything; 1 not measured"
    (sent,) = lab.sent
    assert str(sent.body).count("no answer") == 1
    assert str(sent.body).count(LOST.reason) == 1
    lab.measured = ZeroDivisionError("by us")
    lab.next_day()
    with pytest.raises(ZeroDivisionError):
        lab.run()
    assert lab.texts[1:] == ["lab 2026-11-23: no answer: ZeroDivisionError: by us"]


def test_a_regression_of_older_results_is_told_and_fails_no_night(lab: Lab) -> None:
    old = SLOWER.model_copy(update={"is_old": True, "since": "2026-09-20"})
    lab.regressions = (old,)
    night = lab.run()
    assert (night.verdict, night.exit_code) == ("good", 0)
    told = (
        "lab 2026-11-22: new regression: decode_tokens_per_s of my-llama W4A16 on SM8750 -8.2% "
        "since 2026-09-20, in older results (aaaaaaaaaa..bbbbbbbbbb)"
    )
    assert lab.texts == [told]
    lab.next_day()
    night = lab.run()
    assert (night.text, lab.texts) == ("all is well, 3 cells done", [told])
    assert [each.id for each in night.regressions] == [old.id]
    lab.regressions = (old, SLOWER.model_copy(update={"id": "18", "cause": "18"}))
    lab.next_day()
    assert lab.run().exit_code == 1


def test_a_receiver_that_was_down_is_told_later(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.regressions, lab.deaf = (SLOWER,), True
    lab.run()
    assert "chat: it is down; the next `qnnfarm nightly` tries again" in (capsys.readouterr().err)
    lab.deaf = False
    lab.next_day()
    for _ in range(2):
        lab.run()
    assert [text.partition(":")[0] for text in lab.texts] == ["lab 2026-11-22"]


def test_each_night_is_notified_on_request(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "nights", when="always", tell=[{"command": ["b"]}, {"command": ["a"]}])
    for _ in range(2):
        lab.run()
    assert lab.texts == ["lab 2026-11-22: all is well, 3 cells done"] * 2, "one for each receiver"


def test_a_message_has_all_that_a_program_or_a_reader_of_mail_needs(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "nights", url="https://lab.example.com/nightly/")
    lab.regressions = (SLOWER,)
    lab.measured = Measured(Cells(done=2, failed=1), (LOST,))
    lab.run()
    (notification,) = lab.sent
    message = json.loads(json.dumps(notification.as_mapping()))
    assert message["text"].startswith("lab 2026-11-22: new regression: decode_tokens_per_s of")
    assert message["text"].endswith("; 1 not measured: head/phone/bench: it went away")
    assert (message["event"], message["verdict"], message["error"]) == ("nightly", "bad", None)
    assert message["containers"] == [{"label": "head", "sha256": "c" * 64, "changed": True}]
    assert message["regressions"] == [SLOWER.model_dump(mode="json")]
    assert message["failures"] == [LOST.model_dump()]
    assert message["report"] == "https://lab.example.com/nightly/2026-11-22/report.html"
    assert "  new: head/phone/bench: it went away\n" in notification.body
    assert "Changed containers: head\n" in notification.body


def test_the_newest_nights_stay_and_so_does_what_others_put_there(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "nights", keep=2)
    (lab.folder / "2026-01-01").mkdir(parents=True)
    (lab.folder / "notes").mkdir()
    lab.measured = Measured(Cells(left=1), no_answer="no device")
    for number in range(5):
        if number == 1:
            lab.regressions = (SLOWER,)
            lab.measured = WELL
        if number == 2:
            lab.measured = Measured(Cells(left=1), no_answer="no device")
        lab.run()
        lab.next_day()
    kept = sorted(path.name for path in lab.folder.iterdir() if path.is_dir())
    assert kept == ["2026-01-01", "2026-11-23", "2026-11-25", "2026-11-26", "notes"]


def test_records_that_are_damaged_newer_or_of_another_plan(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run()
    record = lab.folder / "2026-11-22" / RECORD
    text = record.read_text()
    record.write_text(text[:40])
    lab.next_day()
    assert lab.run().verdict == "good"
    assert "is no record of a night" in capsys.readouterr().err
    for old, new, told in (
        ('"format": 1', '"format": 2', "a newer qnnfarm wrote it"),
        ('"lab"', '"other"', "nights of the plan other: give each plan its"),
    ):
        record.write_text(text.replace(old, new))
        with pytest.raises(HostFileError, match=told):
            lab.run()


def test_the_page_shows_hostile_text_as_text(lab: Lab) -> None:
    reason = "<script>alert(1)</script>\x1b[2J"
    lab.measured = Measured(Cells(), (LOST.model_copy(update={"reason": reason}),))
    lab.run()
    page = (lab.folder / INDEX).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\u241b[2J" in page
    assert "\x1b" not in lab.texts[0]
