"""What `qnnfarm run` shows meanwhile: lines into a pipe, a table on a terminal."""

import io
from dataclasses import replace

from rich.console import Console

from harness.cli.run_progress import RunProgress
from harness.errors import DeviceLostError, RequirementError
from harness.plans.outcome import CellOutcome, CellResult, Failure
from tests.harness.plans.farm import cells


def shown(*, terminal: bool) -> str:
    first, second, third, _ = todo = cells(4)
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=100)
    progress = RunProgress(console, todo, done_before=1)
    progress.on_cell_start(first, "pixel")
    progress.on_cell_start(second, "board")
    failure = Failure.of(DeviceLostError("s", "[red]push", "off\x1b[2J"), first.workload)
    progress.on_cell_retry(first, "pixel", failure)
    done = CellOutcome(
        second, "done", device="board", result=CellResult(summary="fast"), duration_s=8.0
    )
    progress.on_cell_end(done)
    progress.on_cell_start(third, "board")
    failed = replace(done, cell=first, status="failed", failures=(("pixel", failure),))
    progress.on_cell_end(replace(failed, device="pixel"))
    if terminal:
        console.print(progress.render())
    progress.on_stop()
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_lines_without_a_terminal() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines == [
        "retry cell-0 after DeviceLostError on pixel: device s went away during [red]push: off [2J",
        "[2/4] done cell-1 on board in 8.0 s: fast",
        "[3/4] failed cell-0: DeviceLostError: device s went away during [red]push: off [2J",
        "stopping: ending what runs on the devices; interrupt again to leave at once",
    ]


def waited_for(*, terminal: bool) -> str:
    todo = cells(12)
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=100)
    progress = RunProgress(console, todo, done_before=0)
    progress.on_wait("soc=SM8750", "pixel is held by ann: nightly since 21:00:00")
    progress.on_wait("tag=hot", "board is draining (swollen) since 20:00:00")
    progress.on_wait("soc=SM8750", "")
    failure = Failure.of(RequirementError("tag=old", "none has the tag old"), todo[0].workload)
    progress.on_no_device(
        [CellOutcome(cell, "failed", failures=(("", failure),)) for cell in todo[:11]]
    )
    if terminal:
        console.print(progress.render())
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_who_waits_says_for_what_and_cells_of_one_reason_are_one_line() -> None:
    refused = "RequirementError: no device of the pool meets tag=old: none has the tag old"
    assert waited_for(terminal=False).splitlines() == [
        "waiting for soc=SM8750: pixel is held by ann: nightly since 21:00:00",
        "waiting for tag=hot: board is draining (swollen) since 20:00:00",
        f"[11/12] failed cell-0, cell-1, cell-2, cell-3 and 7 more: {refused}",
    ]
    shown = waited_for(terminal=True)
    assert "waiting for tag=hot: board is draining (swollen) since 20:00:00" in shown
    assert "soc=SM8750" not in shown
    assert "0 done, 11 failed, 1 left" in shown


def test_a_table_on_a_terminal() -> None:
    text = shown(terminal=True)
    assert "\x1b[2J" not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["board", "cell-2", "0", "s"] in rows
    assert "2 done, 1 failed, 1 left, about 4 s to go" in text
    assert "[2/4]" not in text
    assert "[3/4] failed cell-0" in text
