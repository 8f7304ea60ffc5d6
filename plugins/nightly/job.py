"""The nightly job: one night from its lock to its message."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from buildlib.error_base import QnnfarmError, one_line
from harness.plans.builds import ContainerBuild
from harness.plans.plan_file import NightlyEntry
from plugins.nightly.archive import REPORT, Archive, next_name, night_name
from plugins.nightly.messages import Send, tell, tell_late
from plugins.nightly.night import (
    Cells,
    Container,
    Night,
    NightFailure,
    Regression,
    SeriesCounts,
    judge_night,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Outcome of the cells of a plan.

    Attributes:
        no_answer: why nothing was measured; empty if something was.
    """

    cells: Cells
    failures: tuple[NightFailure, ...] = ()
    no_answer: str = ""


@dataclass(frozen=True, slots=True)
class Reported:
    """Facts of the histories in the report of a night.

    Attributes:
        turnover: which of them end or begin.
    """

    turnover: tuple[str, ...]
    series: SeriesCounts


class Steps(Protocol):
    """The steps of a night. All but `measure` may be repeated at will."""

    def build(self) -> Sequence[ContainerBuild]:
        """Build the containers that have changed."""
        ...

    def measure(
        self, *, fresh: bool, skipped: Collection[str], on_begin: Callable[[str], None]
    ) -> Measured:
        """Run the plan.

        Args:
            fresh: measure all cells, not only those that are left of a night that was cut off.
            skipped: labels of containers to leave out.
            on_begin: called with the journal's identifier before the first cell.
        """
        ...

    def judge(self) -> tuple[Regression, ...]:
        """Compare with the history; return all open regressions, known ones too."""
        ...

    def settle(self, night: Night) -> None:
        """Remember that the regressions of a night have been told, and are no news any more."""
        ...

    def write_report(self, path: Path, began_at: datetime) -> Reported | None:
        """Write the report of the night that began then; None without any results."""
        ...


@dataclass(frozen=True, slots=True)
class NightlyJob:
    """The job of one plan.

    Attributes:
        start: makes the record of a night that begins now, by its name.
        now: the time, in the zone whose noon separates nights.
    """

    archive: Archive
    settings: NightlyEntry
    steps: Steps
    start: Callable[[str], Night]
    now: Callable[[], datetime]
    send: Send

    def run(self, *, again: bool = False) -> Night:
        """Do tonight's work, or the rest of it; do nothing if it is over.

        Args:
            again: begin another night, though tonight's is over.

        Raises:
            NightlyBusyError: another process works on it.
            HostFileError: the folder of the nights cannot be used.
        """
        with self.archive.lock():
            nights = self.archive.nights()
            night = self._tonight(nights, again=again)
            earlier = [each for each in nights if each.name != night.name]
            for each in earlier:
                tell_late(each, self.settings, self.archive.save, self.send)
            bug: Exception | None = None
            if not night.is_over:
                before = next((each for each in reversed(earlier) if each.is_over), None)
                night, bug = self._work(night, before)
                self.archive.prune(self.settings.keep)
            self.archive.write_index(self.now())
            night = tell(night, self.settings, self.archive.save, self.send)
            if night.is_over:  # who did not take its message is in its record
                self.steps.settle(night)
            if bug is not None:
                raise bug
            return night

    def _tonight(self, nights: Sequence[Night], *, again: bool) -> Night:
        """Return the newest night of this date if it is not over, or is not to be repeated."""
        name = night_name(self.now())
        tonight = [each for each in nights if each.name.partition(".")[0] == name]
        if not tonight:
            return self.start(name)
        if again and tonight[-1].is_over:
            return self.start(next_name(name, {each.name for each in tonight}))
        return tonight[-1]

    def _work(self, night: Night, before: Night | None) -> tuple[Night, Exception | None]:
        """Do all but telling; also return an error that is a bug."""
        text = night.text if night.verdict else None
        draft, bug = _Draft(self.archive, night), None
        draft.update(verdict=None, error="", regressions=(), failures=(), cells=Cells())
        try:
            self._measure(draft)
            if not draft.night.error:
                draft.update(regressions=self.steps.judge())
            reported = self.steps.write_report(self.archive.path(night) / REPORT, night.began_at)
            found = reported or Reported((), SeriesCounts())
            draft.update(report=reported is not None, turnover=found.turnover, series=found.series)
        except (QnnfarmError, OSError) as error:
            draft.update(error=one_line(str(error), 1000))
        except Exception as error:  # noqa: BLE001  (a job that nobody watches tells its bugs, too)
            bug = error
            draft.update(error=one_line(f"{type(error).__name__}: {error}", 1000))
        draft.night = judge_night(draft.night, before)
        receivers = {} if draft.night.text == text else {"told": (), "untold": ()}
        draft.update(finished_at=self.now(), **receivers)
        return draft.night, bug

    def _measure(self, draft: "_Draft") -> None:
        builds = self.steps.build()
        unbuilt = [build for build in builds if build.error]
        draft.update(
            containers=tuple(
                Container(label=build.label, sha256=build.sha256)
                for build in builds
                if not build.error
            )
        )
        result = self.steps.measure(
            fresh=draft.night.plan_run_id is None,
            skipped={build.label for build in unbuilt},
            on_begin=lambda plan_run_id: draft.update(plan_run_id=plan_run_id),
        )
        failures = [
            NightFailure(cell=f"build {build.label}", error="BuildError", reason=build.error)
            for build in unbuilt
        ]
        draft.update(
            cells=result.cells,
            failures=(*failures, *result.failures),
            error=result.no_answer,
        )


class _Draft:
    """The record of a night while it is worked on, on the disk after each change."""

    def __init__(self, archive: Archive, night: Night) -> None:
        self._archive = archive
        self.night = night

    def update(self, **fields: object) -> None:
        """Change fields."""
        self.night = self.night.model_copy(update=fields)
        self._archive.save(self.night)
