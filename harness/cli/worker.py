"""`qnnfarm worker`: runs cells of a lab's plans on the devices of this host."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import LabDb, MaxParallel, PoolFile, lab_extra
from harness.console import print_remark
from harness.errors import WrongUseError


def worker(
    db: LabDb = None,
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
    builds: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            metavar="FOLDER",
            help="Run builds, too; they write below this folder, which all hosts share.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run cells and builds that --lab submits on this host.

    It runs until Ctrl-C or SIGTERM, which gives its cells and builds to other workers.

    Example: qnnfarm worker --db postgresql+psycopg://USER@HOST/DATABASE
    """
    with lab_extra("`qnnfarm worker`"):
        from harness.lab.worker import work
    if db is None:
        raise WrongUseError("name the lab's database by --db or $QNNFARM_LAB")
    work(
        db,
        pool,
        max_parallel=max_parallel,
        dead_after_s=dead_after,
        builds=builds,
        on_progress=print_remark,
    )
