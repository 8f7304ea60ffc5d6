"""What commands that run a container have in common: a container on a device."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.workloads.session import OnRepetition, Session


@contextmanager
def open_session(
    container_dir: Path,
    name: str | None,
    *,
    wait_s: float = 0.0,
    on_repetition: "OnRepetition | None" = None,
) -> Iterator["Session"]:
    """Load the container, lease the device, and leave nothing of the run on it at the end.

    Raises:
        BuildError: the container is not whole.
        LeaseTimeoutError: somebody else held the device for longer than `wait_s`.
        HarnessError: no device, or one that cannot run this container.
    """
    from buildlib.container.container import GenAIContainer
    from harness.cli.leasing import leased
    from harness.cli.progress import deploy_progress
    from harness.workloads.session import Session, SessionOptions

    container = GenAIContainer.load(container_dir)
    options = SessionOptions(shown=deploy_progress, on_repetition=on_repetition)
    with (
        leased(name, wait_s=wait_s, purpose=f"running {container.metadata.model.name}") as device,
        Session(device, container, options) as session,
    ):
        yield session
