"""Options of `bench` and `compare`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.device_lease import device_source
from harness.cli.dialog_options import tell_faults
from harness.cli.measured import in_words
from harness.cli.progress import deploy_progress
from harness.console import print_remark
from harness.errors import WrongUseError
from harness.results.database import shown
from harness.results.perplexity import PerplexityBound
from harness.results.records import MAX_LABELS
from harness.results.store import LazyResultsStore
from harness.runtimes.base import GenerationResult, LogLevel
from harness.runtimes.bundles.bundle import pushed_files
from harness.telemetry.charge import ChargeWindow
from harness.telemetry.conditions import Conditions
from harness.telemetry.sampler import DEFAULT_HZ
from harness.workloads.bench import STEADY_METRICS, Bench
from harness.workloads.bench_series import BenchSeries, OnSession
from harness.workloads.output_check import read_tokens
from harness.workloads.session import Prepare, SessionOptions, meet_conditions

_COOL_C, _STABLE_S, _MOST_WAIT_S = 45.0, 20.0, 180.0
_GIVEN_WAIT_S = 600.0
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        help="A device: SERIAL, SERIAL@HOST, linux:HOST, virtual:NAME, or a member of the pool; "
        "may be repeated, and then they take turns. By default $ANDROID_SERIAL, those of the pool "
        "that fit, or the only one.",
    ),
]
PromptTokens = Annotated[
    int, typer.Option("-p", "--prompt-tokens", help="Tokens to prefill, bos included.")
]
NewTokens = Annotated[int, typer.Option("-n", "--new-tokens", help="Tokens to generate.")]
Repetitions = Annotated[
    int, typer.Option("-r", "--repetitions", help="Measured repetitions of a session.")
]
MostWarmups = Annotated[
    int, typer.Option("--max-warmup", help="Most warm-ups, if their number is detected.")
]
Warmup = Annotated[
    int | None,
    typer.Option(
        "-w",
        "--warmup",
        help="Fixed number of warm-up repetitions, left out of means. By default, until the speeds "
        "are steady.",
    ),
]
ReferenceTokens = Annotated[
    Path | None, typer.Option(help="File of the token ids that the output must begin with.")
]
MaxPerplexity = Annotated[
    str | None,
    typer.Option(
        metavar="N|P%",
        help="Fail if the container's perplexity on the device is above N, or more than P percent "
        "away from the model in float. It is measured before the speed, over --perplexity-text, "
        "unless the database has just that.",
    ),
]
PerplexityText = Annotated[
    Path | None,
    typer.Option(
        help="The text that --max-perplexity is measured over; by default a built-in passage."
    ),
]
PerplexityWindows = Annotated[
    int | None,
    typer.Option(min=1, help="Windows of the context length that are scored of it; by default 1."),
]
Reference = Annotated[
    Path | None,
    typer.Option(
        metavar="CHECKPOINT_DIR",
        help="The checkpoint that the container was built from, to score in float on this host for "
        "--max-perplexity P%; by default what `qnnfarm perplexity --reference` stored.",
    ),
]
Label = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="KEY=VALUE",
        help="Store the runs with a label of your own, which names them in reports; may be "
        "repeated.",
    ),
]
MaxTemp = Annotated[
    float | None,
    typer.Option(
        help="Wait, at most 10 minutes, until no part of the device is hotter, in degrees Celsius. "
        "By default, at most 3 minutes, until 45 or steady for 20 s."
    ),
]
Charge = Annotated[
    str | None,
    typer.Option(
        metavar="LOW-HIGH", help="Measure only within this window of charge in percent: 20-80."
    ),
]
NoGate = Annotated[bool, typer.Option("--no-gate", help="Measure the device as it is.")]


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """The options of the perplexity that a container must have."""

    max_perplexity: str | None
    text: Path | None
    windows: int | None
    reference: Path | None

    def fields(self) -> dict[str, object]:
        """Return the given ones as fields of the workload.

        Raises:
            WrongUseError: one cannot be used.
        """
        if self.max_perplexity is None:
            given = {
                "--perplexity-text": self.text,
                "--perplexity-windows": self.windows,
                "--reference": self.reference,
            }
            lone = next((name for name, value in given.items() if value is not None), None)
            if lone is not None:
                raise WrongUseError(f"{lone} goes with --max-perplexity, which is missing")
            return {}
        bound = parse_bound(self.max_perplexity)
        if self.reference is not None and not self.reference.is_dir():
            raise WrongUseError(f"--reference: {self.reference} is not a folder of a checkpoint")
        found = {
            "max_perplexity": str(bound) if bound.relative else bound.limit,
            "perplexity_text": None if self.text is None else str(self.text.absolute()),
            "perplexity_windows": self.windows,
            "reference": None if self.reference is None else str(self.reference.absolute()),
        }
        return {key: value for key, value in found.items() if value is not None}


def parse_bound(text: str) -> PerplexityBound:
    """Read `--max-perplexity`.

    Raises:
        WrongUseError: it is no bound.
    """
    try:
        return PerplexityBound.parse(text)
    except WrongUseError as error:
        raise WrongUseError(f"--max-perplexity: {error}") from error


def bench_workload(
    prompt_tokens: int,
    new_tokens: int,
    repetitions: int,
    warmup: int | None,
    max_warmup: int,
    reference_tokens: Path | None,
    quality: QualityOptions,
    depth: int = 0,
    dialog: Mapping[str, object] | None = None,
) -> Bench:
    """Make the workload from the options.

    Args:
        dialog: fields of how the dialog runs.

    Raises:
        WrongUseError: a number is out of range, or the file of tokens cannot be used.
    """
    if reference_tokens is not None:
        read_tokens(reference_tokens)  # refused before a device is leased
    return Bench.of(
        prompt_tokens=prompt_tokens,
        depth_tokens=depth or None,
        new_tokens=new_tokens,
        repetitions=repetitions,
        warmup="auto" if warmup is None else warmup,
        most_warmups=max_warmup,
        reference_tokens=None if reference_tokens is None else str(reference_tokens),
        **quality.fields(),
        **(dialog or {}),
    )


def parse_labels(texts: Sequence[str] | None) -> dict[str, str]:
    """Read `--label` options.

    Raises:
        WrongUseError: one is no KEY=VALUE, a key occurs twice, or there are too many.
    """
    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not (equals and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}", key)):
            raise WrongUseError(f"--label {text[:40]!r} is no KEY=VALUE, as in team=camera")
        if not re.fullmatch(r"[^\x00-\x1f\x7f]{1,200}", value):
            raise WrongUseError(f"--label {key}: the value is 1 to 200 printable characters")
        if key in found:
            raise WrongUseError(f"--label {key} is given twice")
        found[key] = value
    if len(found) > MAX_LABELS:
        raise WrongUseError(f"{len(found)} labels are too many: at most {MAX_LABELS}")
    return found


def conditioning(*, max_temp: float | None, charge: str | None, no_gate: bool) -> Prepare | None:
    """Make what brings a device into its measuring conditions, from the options.

    Conditions given by an option must be met, or the run fails. Without one, sessions still wait
    for a cool device, but only record if it stays hot.

    Raises:
        WrongUseError: the charge is no window, or conditions are both given and forbidden; or a
            value is out of range.
    """
    if no_gate:
        if max_temp is not None or charge is not None:
            raise WrongUseError("--no-gate goes with neither --max-temp nor --charge")
        return None
    given = max_temp is not None or charge is not None
    conditions = Conditions(
        max_temp_c=_COOL_C if max_temp is None else max_temp,
        stable_s=_STABLE_S if max_temp is None else None,
        max_wait_s=_MOST_WAIT_S if max_temp is None else _GIVEN_WAIT_S,
        charge=None if charge is None else ChargeWindow(*_window(charge)),
        screen_off=True,
        policy="fail" if given else "continue",
    )
    return partial(meet_conditions, conditions, on_wait=print_remark)


def _window(text: str) -> tuple[float, float]:
    match = re.fullmatch(r"([0-9]{1,3})-([0-9]{1,3})", text)
    low, high = (int(match[1]), int(match[2])) if match else (1, 0)
    if not 0 <= low < high <= 100:
        raise WrongUseError(f"{text[:20]!r} is not a window of charge in percent: as in 20-80")
    return float(low), float(high)


@contextmanager
def open_series(
    names: Sequence[str] | None,
    pool: Path | None,
    db: str,
    *,
    wait_s: float,
    prepare: Prepare | None,
    on_session: OnSession,
    labels: Mapping[str, str],
    log_level: LogLevel | None = None,
    trace: bool = False,
    push: Sequence[str] | None = None,
) -> Iterator[BenchSeries]:
    """Open the store and the source of devices for a series of sessions.

    Args:
        names, pool, wait_s: see `device_source`.
        prepare: see `conditioning`.
        labels: of all runs.
        log_level, trace: see `SessionOptions`.
        push: see `pushed_files`.

    Raises:
        WrongUseError: see `pushed_files`.
        StoreError: the database cannot be used.
        PoolError: the pool cannot be used.
    """
    options = SessionOptions(
        telemetry_hz=DEFAULT_HZ,
        prepare=prepare,
        shown=deploy_progress,
        on_repetition=_tell_repetition,
        log_level=log_level,
        trace=trace,
        push=pushed_files(push or ()),
    )
    with (
        report_interrupt(shown(db)),
        LazyResultsStore(db) as store,
        device_source(names, pool, command="bench", wait_s=wait_s) as source,
    ):
        yield BenchSeries(source, store, options, on_session, labels)


def _tell_repetition(number: int, total: int, result: GenerationResult) -> None:
    """Print a repetition's speeds; `total` is the highest possible count, warm-ups included."""
    rates = {key: result.metrics[key] for key in STEADY_METRICS if key in result.metrics}
    print_remark(f"repetition {number + 1}, at most {total}: {in_words(rates)}")
    tell_faults(result)


@contextmanager
def report_interrupt(db: str) -> Iterator[None]:
    """Say at Ctrl-C what happens to what was measured so far."""
    try:
        yield
    except KeyboardInterrupt:
        print_remark(f"interrupted: {db} has the finished sessions, and marks the unfinished one")
        raise
