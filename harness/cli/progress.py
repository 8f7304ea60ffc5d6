"""Progress of a deployment on stderr: bytes, rate and time left."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from harness.console import progress, visible
from harness.deploy.push import Progress as OnProgress


@contextmanager
def deploy_progress(device: str) -> Iterator[OnProgress]:
    """Show one deployment to `device`; gives its `on_progress`.

    The bar appears with the first pushed byte, says when the device hashes, and goes away at the
    end. There is none where stderr is not a terminal.
    """
    device = visible(device)
    with progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ) as bar:
        task = bar.add_task(f"push to {device}", total=None, visible=False)

        def update(sent: int, total: int) -> None:
            what = "push to" if sent < total else "hashing on"
            bar.update(
                task, completed=sent, total=total, description=f"{what} {device}", visible=True
            )

        yield update
