"""`qnnfarm worker`: runs cells of a lab's plans on the devices of this host."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import FromHost, LabDb, MaxParallel, PoolFile, lab_extra
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
    build_memory: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="GIB",
            help="Memory for builds; by default two thirds of what is available now. 0 leaves "
            "builds to other hosts.",
            show_default=False,
        ),
    ] = None,
    origin: FromHost = "",
    nightly: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.yaml",
            help="Plan whose nights the lab runs at the times of --cron; one worker of all that "
            "have it runs each, by `qnnfarm nightly --lab`.",
            show_default=False,
        ),
    ] = None,
    cron: Annotated[
        str, typer.Option(metavar="CRON", help="When nights begin, in UTC.")
    ] = "0 2 * * *",
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
        build_memory=None if build_memory is None else int(build_memory * 2**30),
        host=origin,
        nightly=nightly,
        cron=cron,
        on_progress=print_remark,
    )
