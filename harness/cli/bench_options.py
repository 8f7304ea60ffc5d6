"""Options of `bench` and `compare`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import (
    DEFAULT_RUNTIME,
    WAIT_S,
    LongRuntime,
    PoolFile,
    RecordOptions,
    Timeout,
    Wait,
    absolute,
    find_reference,
)
from harness.cli.completion import complete_devices
from harness.cli.device_lease import deploy_progress, device_source, tell_running
from harness.cli.dialog_options import tell_faults
from harness.cli.recorded_session import in_words, writing_trace
from harness.console import print_remark
from harness.errors import WrongUseError
from harness.results.database import shown
from harness.results.metrics import LEADING_METRICS
from harness.results.records import MAX_LABELS
from harness.results.store import LazyResultsStore
from harness.runtimes.base import GenerationResult
from harness.runtimes.bundles.bundle import pushed_files
from harness.telemetry.charge import ChargeWindow
from harness.telemetry.conditions import Conditions, meet_conditions
from harness.telemetry.sampler import DEFAULT_HZ
from harness.workloads.bench import Bench
from harness.workloads.bench_series import BenchSeries, OnSession
from harness.workloads.output_check import read_tokens
from harness.workloads.session import Prepare, SessionOptions

_COOL_C, _STABLE_S, _MOST_WAIT_S = 45.0, 20.0, 180.0
_ASKED_WAIT_S = 600.0
Label = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="KEY=VALUE",
        help="Store the runs with a label of your own, which names them in reports; may be "
        "repeated.",
    ),
]


@dataclass(frozen=True)
class BenchOptions(RecordOptions):
    """Options that benchmarks of one container and of two have in common."""

    device: Annotated[
        list[str] | None,
        typer.Option(
            help="A device: SERIAL, SERIAL@HOST, linux:HOST, virtual:NAME, or a member of the "
            "pool; may be repeated, and then they take turns. By default $ANDROID_SERIAL, those of "
            "the pool that fit, or the only one.",
            autocompletion=complete_devices,
        ),
    ] = None
    pool: PoolFile = None
    timeout: Timeout = None
    runtime: LongRuntime = DEFAULT_RUNTIME
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", help="Measured repetitions of a session.")
    ] = 3
    warmup: Annotated[
        int | None,
        typer.Option(
            "-w",
            "--warmup",
            help="Fixed number of warm-up repetitions, left out of means. By default, until the "
            "speeds are steady.",
        ),
    ] = None
    most_warmups: Annotated[
        int, typer.Option("--max-warmup", help="Most warm-ups, if their number is detected.")
    ] = 3
    reference_tokens: Annotated[
        Path | None, typer.Option(help="File of the token ids that the output must begin with.")
    ] = None
    max_perplexity: Annotated[
        str | None,
        typer.Option(
            metavar="N|P%",
            help="Fail if the container's perplexity on the device is above N, or more than P "
            "percent away from the model in float. It is measured before the speed, over "
            "--perplexity-text, unless the database has just that.",
        ),
    ] = None
    perplexity_text: Annotated[
        Path | None,
        typer.Option(
            help="The text that --max-perplexity is measured over; by default a built-in passage."
        ),
    ] = None
    perplexity_windows: Annotated[
        int | None,
        typer.Option(
            min=1, help="Windows of the context length that are scored of it; by default 1."
        ),
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT_DIR",
            help="The checkpoint that the container was built from, as `build` takes it, to score "
            "in float on this host for --max-perplexity P%; by default what `qnnfarm perplexity "
            "--reference` stored.",
        ),
    ] = None
    label: Label = None
    max_temp: Annotated[
        float | None,
        typer.Option(
            help="Wait, at most 10 minutes, until no part of the device is hotter, in degrees "
            "Celsius. By default, at most 3 minutes, until 45 or steady for 20 s."
        ),
    ] = None
    charge: Annotated[
        str | None,
        typer.Option(
            metavar="LOW-HIGH", help="Measure only within this window of charge in percent: 20-80."
        ),
    ] = None
    no_gate: Annotated[bool, typer.Option("--no-gate", help="Measure the device as it is.")] = False
    wait: Wait = WAIT_S

    def workload(self, prompt_tokens: int, new_tokens: int, **others: object) -> Bench:
        """Make a workload.

        Args:
            others: its other fields.
        """
        if self.reference_tokens is not None:
            read_tokens(self.reference_tokens)  # refused before a device is leased
        find_reference(self.reference)
        return Bench.of(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repetitions=self.repetitions,
            warmup="auto" if self.warmup is None else self.warmup,
            most_warmups=self.most_warmups,
            reference_tokens=None if self.reference_tokens is None else str(self.reference_tokens),
            max_perplexity=self.max_perplexity,
            perplexity_text=absolute(self.perplexity_text),
            perplexity_windows=self.perplexity_windows,
            reference=self.reference,
            **others,
        )

    def conditioning(self) -> Prepare | None:
        """Return the preparation of a device for measuring.

        Conditions that an option names must be met, or the run fails. Without one, sessions still
        wait for a cool device, but only record if it stays hot.
        """
        is_asked = self.max_temp is not None or self.charge is not None
        if self.no_gate:
            if is_asked:
                raise WrongUseError("--no-gate goes with neither --max-temp nor --charge")
            return None
        conditions = Conditions(
            max_temp_c=_COOL_C if self.max_temp is None else self.max_temp,
            stable_s=_STABLE_S if self.max_temp is None else None,
            max_wait_s=_MOST_WAIT_S if self.max_temp is None else _ASKED_WAIT_S,
            charge=None if self.charge is None else ChargeWindow(*_window(self.charge)),
            screen_off=True,
            policy="fail" if is_asked else "continue",
        )
        return partial(meet_conditions, conditions, on_wait=print_remark)

    @contextmanager
    def open_series(self, db: str, on_session: OnSession) -> Iterator[BenchSeries]:
        """Open the store and the source of devices for a series of sessions."""
        labels = parse_labels(self.label)
        options = SessionOptions(
            telemetry_hz=DEFAULT_HZ,
            prepare=self.conditioning(),
            shown=deploy_progress,
            runner_timeout_s=self.timeout,
            on_running=tell_running,
            on_repetition=_tell_repetition,
            log_level=self.log_level,
            trace=self.trace is not None,
            push=pushed_files(self.push or ()),
        )
        with (
            report_interrupt(shown(db)),
            LazyResultsStore(db) as store,
            device_source(self.device, self.pool, command="bench", wait_s=self.wait) as source,
        ):
            series = BenchSeries(source, store, options, on_session, labels)
            with writing_trace(self.trace, store, series.group_ids):
                yield series


def parse_labels(texts: Sequence[str] | None) -> dict[str, str]:
    """Read `--label` options."""
    labels: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not (equals and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}", key)):
            raise WrongUseError(f"--label {text[:40]!r} is no KEY=VALUE, as in team=camera")
        if not re.fullmatch(r"[^\x00-\x1f\x7f]{1,200}", value):
            raise WrongUseError(f"--label {key}: the value is 1 to 200 printable characters")
        if key in labels:
            raise WrongUseError(f"--label {key} is given twice")
        labels[key] = value
    if len(labels) > MAX_LABELS:
        raise WrongUseError(f"{len(labels)} labels are too many: at most {MAX_LABELS}")
    return labels


def _window(text: str) -> tuple[float, float]:
    match = re.fullmatch(r"([0-9]{1,3})-([0-9]{1,3})", text)
    low, high = (int(match[1]), int(match[2])) if match else (1, 0)
    if not 0 <= low < high <= 100:
        raise WrongUseError(f"{text[:20]!r} is not a window of charge in percent: as in 20-80")
    return float(low), float(high)


def _tell_repetition(number: int, total: int, result: GenerationResult) -> None:
    """Print a repetition's speeds; `total` is the highest possible count, warm-ups included."""
    rates = {key: result.metrics[key] for key in LEADING_METRICS if key in result.metrics}
    print_remark(f"repetition {number + 1}, at most {total}: {in_words(rates)}")
    tell_faults(result)


@contextmanager
def report_interrupt(db: str) -> Iterator[None]:
    """Say at Ctrl-C which sessions the database has."""
    try:
        yield
    except KeyboardInterrupt:
        print_remark(f"interrupted: {db} has the finished sessions, and marks the unfinished one")
        raise
