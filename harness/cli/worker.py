"""`qnnfarm worker`: runs cells of a lab's plans on the devices of this host."""

from typing import Annotated

import typer

from harness.cli.arguments import MaxParallel, PoolFile
from harness.console import print_remark
from harness.errors import WrongUseError


def worker(
    db: Annotated[
        str,
        typer.Option(
            "--db",
            envvar="QNNFARM_LAB",
            help="Database of the lab's results, which has its queue: postgresql+psycopg://...",
        ),
    ],
    pool: PoolFile = None,
    max_parallel: MaxParallel = None,
    dead_after: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds after which a worker that is not heard of counts as dead; the same on "
            "all hosts.",
        ),
    ] = 30.0,
) -> None:
    """Run cells of the plans that `qnnfarm run --lab` submits, on this host's devices.

    It runs until Ctrl-C or SIGTERM, which gives its cells to other workers.

    Example: qnnfarm worker --db postgresql+psycopg://USER@HOST/DATABASE
    """
    try:
        from harness.lab.worker import work
    except ImportError as error:
        reason = f"`qnnfarm worker` needs {error.name}: pip install 'qnnfarm[lab]'"
        raise WrongUseError(reason) from error
    work(db, pool, max_parallel=max_parallel, dead_after_s=dead_after, on_progress=print_remark)
