"""`qnnfarm demo`: the main job from end to end on this machine, without a phone and without an SDK.

Builds the reference model for two SoCs, starts a virtual device of each, deploys, measures, stores
and reports. Everything on the way is real: the compiler, the adb server, Genie, and the HTP
emulator, whose speed is not that of hardware.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import Json
from harness.devices.spec import find_type

SOCS = ("SM8650", "SM8750")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for containers, results and report.")] = Path(
        "qnnfarm-demo"
    ),
    *,
    json: Json = False,
) -> None:
    """Build, run, measure and report a model on two virtual devices. No phone, no SDK.

    Example: qnnfarm demo
    """
    from harness.results.store import ResultsStore
    from suites import demo_steps as steps

    find_type("virtual")
    out.mkdir(parents=True, exist_ok=True)
    db = out / "results.db"
    with ExitStack() as stack:
        stack.enter_context(steps.demo_lock())
        progress = stack.enter_context(steps.DemoProgress(total=2 + 3 * len(SOCS)))
        store = stack.enter_context(ResultsStore.open(db))
        builds = {soc: steps.build(soc, out / "containers" / soc, progress) for soc in SOCS}
        references = steps.host_references(builds[SOCS[0]], progress)
        server = stack.enter_context(steps.adb_server())
        for soc in SOCS:
            device = stack.enter_context(steps.virtual_device(soc, server, progress))
            steps.measure(builds[soc].container, device, store, references, progress)
        progress.step(f"report {out / 'report.html'}")
    steps.report(db, out / "report.html", json=json)
    steps.print_leftovers(SOCS)
