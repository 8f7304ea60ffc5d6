"""Records of nights: cells, results and messages."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.errors import BAD, GOOD, NO_ANSWER
from harness.words import percent, pluralize

FORMAT = 1
NIGHT = r"\d{4}-\d{2}-\d{2}(\.[1-9]\d{0,3})?"
Verdict = Literal["good", "bad", "no answer"]
Share = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", regex_engine="python-re")


class Container(_Part):
    """A container of the plan.

    Attributes:
        changed: whether the night before measured another content, or none.
    """

    label: str
    sha256: str
    changed: bool = False


class Cells(_Part):
    """Number of the plan's cells by how they ended."""

    done: int = 0
    failed: int = 0
    left: int = 0


class SeriesCounts(_Part):
    """Number of the series that were measured this night.

    Attributes:
        judged: with a verdict of `qnnfarm report`.
        unjudged: without one, as with too few nights.
        suspected: of these, how many were worse than the nights before explain.
        checked, unchecked: runs whose output was found correct, and those that nobody checked.
    """

    judged: int = 0
    unjudged: int = 0
    suspected: int = 0
    checked: int = 0
    unchecked: int = 0


class NightFailure(_Part):
    """A cell that was not measured, or a container that could not be built.

    Attributes:
        cell: its label; `build LABEL` for a container.
        error: name of the error's class.
        is_new: whether it did not fail so the night before.
    """

    cell: str
    error: str
    reason: str
    is_new: bool = True

    @property
    def key(self) -> tuple[str, str]:
        """Equal for a failure that lasts: its words may differ from night to night."""
        return self.cell, self.error

    def __str__(self) -> str:
        return f"{self.cell}: {self.reason}"


class Regression(_Part):
    """An open alert: a metric of a series that became worse, and stayed so.

    Attributes:
        id: of the alert; the same every night.
        cause: id of the worst alert that began at the same time: one cause shows in many series.
        series: the container, device and workload, in words.
        change: relative; -0.08 is 8 % less.
        since: day (UTC) of the first result after the change, as in `qnnfarm alerts`.
        commits: last before and first after the change; empty where unknown.
        is_new: whether nobody was told of it, nor of another one of its cause that explains it.
        is_old: whether older results brought it in: it is told, and no failure of the night.
    """

    id: str
    cause: str
    metric: str
    series: str
    change: Share
    since: str
    commits: tuple[str, ...] = ()
    is_new: bool = True
    is_old: bool = False

    def __str__(self) -> str:
        words = f"{self.metric} of {self.series} {percent(self.change)} since {self.since}"
        words += ", in older results" if self.is_old else ""
        commits = "..".join(commit[:10] for commit in self.commits)
        return f"{words} ({commits})" if commits else words


class Night(_Part):
    """One night of a plan.

    Attributes:
        name: the date of its evening, `.2` and so on after it for those that were asked for.
        commit: of the working folder's repository.
        plan_run_id: of the plan's journal; `None` before the plan began.
        verdict: `None` while it is not over.
        error: why there is no answer.
        series: how many of them had a verdict.
        turnover: series that have ended or begun, as the report says it.
        news: those of them that are new since the night before.
        report: whether there is a report.
        told: receivers that took its message, by a hash.
        untold: those that did not.
    """

    format: int = FORMAT
    plan: str
    name: Annotated[str, Field(pattern=rf"\A{NIGHT}\Z")]
    began_at: datetime
    finished_at: datetime | None = None
    host: str = ""
    commit: str | None = None
    branch: str | None = None
    plan_run_id: str | None = None
    containers: tuple[Container, ...] = ()
    cells: Cells = Cells()
    failures: tuple[NightFailure, ...] = ()
    regressions: tuple[Regression, ...] = ()
    series: SeriesCounts = SeriesCounts()
    turnover: tuple[str, ...] = ()
    news: tuple[str, ...] = ()
    verdict: Verdict | None = None
    error: str = ""
    report: bool = False
    told: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """True where there is nothing left to measure."""
        return self.verdict in {"good", "bad"}

    @property
    def exit_code(self) -> int:
        """0: all is well; 1: a regression is open, or something was not measured; 2: no answer.

        A regression of older results does not count.
        """
        return {"good": GOOD, "bad": BAD}.get(self.verdict or "", NO_ANSWER)

    @property
    def has_news(self) -> bool:
        """True where anything is wrong that was not the night before, or there is no answer."""
        new = any(each.is_new for each in self.regressions)
        new_failure = any(each.is_new for each in self.failures)
        return new or new_failure or bool(self.news) or self.verdict == "no answer"

    @property
    def text(self) -> str:
        """Name the problems in one line; if there are none, say of how much that is known."""
        return "; ".join(self._parts()) or self._quiet

    @property
    def details(self) -> tuple[tuple[str, bool], ...]:
        """All that is wrong, each in words and whether it is new."""
        error = ((self.error, False),) if self.error else ()
        shown = (each for each in self.regressions if each.is_new or not each.is_old)
        regressions = ((str(each), each.is_new) for each in shown)
        failures = ((str(each), each.is_new) for each in self.failures)
        return (*error, *regressions, *failures)

    @property
    def summary(self) -> str:
        """Say the verdict and the number of problems, above a list of them."""
        text = "; ".join(self._parts(named=False)) or self._quiet
        return text if self.error else f"{self.word}: {text}"

    @property
    def word(self) -> str:
        """The verdict in a word; a night of which nothing was judged is `ran`, not `good`."""
        series = self.series
        is_blind = not series.judged and (series.unjudged or self._unchecked)
        return "ran" if self.verdict == "good" and is_blind else self.verdict or "not over"

    @property
    def _unchecked(self) -> bool:
        return bool(self.series.unchecked and not self.series.checked)

    @property
    def _quiet(self) -> str:
        series, done = self.series, f"{pluralize(self.cells.done, 'cell')} done"
        worse = f" ({series.suspected} worse than before)" if series.suspected else ""
        if not series.judged and series.unjudged:
            return f"no verdict on any of {series.unjudged} series yet{worse}, {done}"
        if not series.judged and self._unchecked:
            return f"nothing was checked, {done}"
        well = f"all is well in {series.judged} series" if series.judged else "all is well"
        unknown = f"no verdict on {series.unjudged} more{worse}" if series.unjudged else ""
        return ", ".join(filter(None, (well, unknown, done)))

    def _parts(self, *, named: bool = True) -> Iterator[str]:
        if self.error:
            yield f"no answer: {self.error}"
        new = _causes(each for each in self.regressions if each.is_new)
        for alike in new:
            more = f" and {len(alike) - 1} more with it" if len(alike) > 1 else ""
            yield f"new regression: {alike[0]}{more}"
        known = (each for each in self.regressions if not (each.is_new or each.is_old))
        if count := len(_causes(known)):
            yield f"{pluralize(count, 'regression')} still open"
        if self.failures:
            which = f": {_first(list(map(str, self.failures)))}" if named else ""
            yield f"{len(self.failures)} not measured{which}"
        if self.news:
            yield _first(self.news)


def judge_night(night: Night, before: Night | None) -> Night:
    """Set the verdict, and the changes since the night before."""
    lasting = {each.key for each in before.failures} if before else set()
    contents = {each.label: each.sha256 for each in before.containers} if before else {}
    problems = night.failures or [each for each in night.regressions if not each.is_old]
    last_turnover = before.turnover if before else night.turnover
    verdict: Verdict = "no answer" if night.error else "bad" if problems else "good"
    failures = [
        each.model_copy(update={"is_new": each.key not in lasting}) for each in night.failures
    ]
    containers = [
        each.model_copy(update={"changed": contents.get(each.label) != each.sha256})
        for each in night.containers
    ]
    return night.model_copy(
        update={
            "news": tuple(each for each in night.turnover if each not in last_turnover),
            "verdict": verdict, "failures": tuple(failures), "containers": tuple(containers),
        }
    )  # fmt: skip


def _causes(regressions: Iterable[Regression]) -> list[list[Regression]]:
    groups: dict[str, list[Regression]] = {}
    for each in regressions:
        groups.setdefault(each.cause, []).append(each)
    return list(groups.values())


def _first(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{words[0]} and {len(words) - 1} more"
