"""The door of a lab: workers on many hosts, to which `--lab` gives builds and plans.

A package has one at the door `qnnfarm.labs`, under the name `lab`: a function that opens it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from buildlib.entry_points import load_entry
from buildlib.errors import BuildError
from harness.errors import WrongUseError

if TYPE_CHECKING:
    from harness.plans.builds import ContainerBuild, PlannedBuild, Tell
    from harness.plans.cells import Cell
    from harness.plans.outcome import Summary
    from harness.plans.plan_file import Plan
    from harness.plans.protocols import Observer

_DOOR = "labs"


class LabRun(Protocol):
    """A run of a plan in a lab, which goes on without this process."""

    @property
    def id(self) -> str:
        """Id of the run, which all its followers share."""

    @property
    def cells(self) -> "Sequence[Cell]":
        """Cells of the plan."""

    @property
    def done_before(self) -> int:
        """Number of cells that were done when it was opened."""

    @property
    def location(self) -> str:
        """Database of the results, for people."""

    def submit(self) -> int:
        """Submit the cells that are not done, do not wait and do not run; return their number."""

    def follow(self, observer: "Observer") -> "Summary":
        """Wait until no cell waits or runs; a KeyboardInterrupt ends the waiting alone."""

    def cancel(self) -> int:
        """End the cells that wait or run; return their number."""


class Lab(Protocol):
    """A lab, opened."""

    def build(
        self,
        builds: "Sequence[PlannedBuild]",
        *,
        overwrite: bool,
        tell: Callable[[str, str], None],
        hear: Callable[[Mapping[str, Any]], None],
    ) -> Iterator[tuple[Mapping[str, Any], str, bool]]:
        """Submit builds, wait for one after the other, and yield what each came to.

        Args:
            overwrite: replace other containers in their folders.
            tell: called with the target and a line when something changes.
            hear: called with the answer of `qnnfarm build --json`; also where a stage changed the
                model, and there is no container.

        Yields:
            The answer, the host that built, and whether it was not built before.

        Raises:
            WrongUseError: a build failed, or was cancelled.
        """

    def build_containers(
        self, plan: "Plan", plan_file: Path, tell: "Tell"
    ) -> "tuple[ContainerBuild, ...]":
        """Build the containers of a plan, all at once; see `build_containers`."""

    def cancel(self, builds: "Sequence[PlannedBuild]") -> int:
        """End builds that wait or run; return their number."""

    def open_run(
        self, plan: "Plan", plan_file: Path, *, only: Sequence[str] = (), fresh: bool = False
    ) -> LabRun:
        """Open the newest run of a plan, or a new one.

        Args:
            only: select cells by patterns of their labels.
            fresh: begin a new one in any case.
        """


OpenLab = Callable[[str], AbstractContextManager[Lab]]
"""Opens the lab of a database, by its URL."""


def find_lab() -> OpenLab:
    """Return what opens labs.

    Raises:
        WrongUseError: nothing does, or what it needs is not installed.
    """
    missing: str | None = "the plugin `lab`"
    try:
        if (found := load_entry(_DOOR, "lab")) is not None:
            return cast("OpenLab", found)
    except BuildError as error:
        missing = getattr(error.__cause__, "name", None)  # of an import
        if missing is None:
            raise
    raise WrongUseError(f"--lab needs {missing}: pip install 'qnnfarm[lab]'")
