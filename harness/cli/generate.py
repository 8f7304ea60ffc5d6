"""`qnnfarm generate`: one prompt through a container on a device."""

from typing import Annotated

import typer

from harness.cli.arguments import (
    WAIT_S,
    ContainerDir,
    DeviceName,
    Json,
    LogLevel,
    PoolFile,
    TraceFile,
    Wait,
    scratch_store,
    showing_log,
    writing_trace,
)
from harness.console import print_json, print_remark, print_text
from harness.errors import WrongUseError


def generate(
    container_dir: ContainerDir,
    prompt: Annotated[str, typer.Option(help="The prompt.")],
    device: DeviceName = None,
    pool: PoolFile = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Stop after that many tokens.")] = 32,
    wait: Wait = WAIT_S,
    log_level: LogLevel = None,
    trace: TraceFile = None,
    json: Json = False,
) -> None:
    """Generate text on a device, greedily, and print its speed."""
    from harness.cli.device_lease import open_session
    from harness.results.metrics import METRICS
    from harness.results.records import new_run_id
    from harness.workloads.base import UNRECORDED, Recording
    from harness.workloads.generate import Generate

    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise WrongUseError("the prompt is not UTF-8: give it in that encoding") from error
    workload = Generate.of(prompt=prompt, max_tokens=max_tokens)
    group_id = new_run_id()
    with (
        scratch_store(trace) as store,
        writing_trace(trace, store, [group_id]),
        open_session(
            container_dir, device, pool, wait_s=wait, log_level=log_level, trace=bool(trace)
        ) as session,
        showing_log(session, log_level),
    ):
        recording = Recording(store.open, group_id) if store else UNRECORDED
        result = workload.run(session, recording).output
    if json:
        print_json(
            {
                **session.device_fields,
                "prompt": prompt,
                "text": result.text,
                "metrics": dict(result.metrics),
            }
        )
        return
    print_text(result.text)
    shown = [
        METRICS[key].label.lower() + " " + METRICS[key].show(value)
        for key, value in result.metrics.items()
    ]
    print_remark(f"{session.device_label}: {', '.join(shown)}")
    if session.properties.emulator:
        print_remark("emulator speed says nothing about hardware speed")
