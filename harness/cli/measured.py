"""Measured values in words, as all commands print them."""

from collections.abc import Iterator, Mapping, Sequence

from harness.console import print_remark
from harness.results.metrics import METRICS
from harness.results.records import Run
from harness.words import emulator_notice, pluralize
from harness.workloads.session import Session


def with_error(key: str, values: Mapping[str, float]) -> str:
    """Show a metric's value with its unit and, if `KEY_error` is there too, its error."""
    metric, error = METRICS[key], values.get(f"{key}_error")
    if error is None:
        return metric.show(values[key])
    spread = f"{metric.format(values[key])} ± {metric.format(error, beside=values[key])}"
    return f"{spread} {metric.shown_unit}".rstrip()


def in_words(values: Mapping[str, float]) -> str:
    """List values by metric, each with its label and its unit."""
    keys = [key for key in values if key.removesuffix("_error") == key or key[:-6] not in values]
    return ", ".join(f"{METRICS[key].label.lower()} {with_error(key, values)}" for key in keys)


def print_from(session: Session, words: str) -> None:
    """Print on stderr where something was measured, and that an emulator's speed says nothing."""
    print_remark(f"{session.device_label}: {words}")
    if session.properties.emulator:
        print_remark(emulator_notice([session.model.runtime.name]))


def caveats(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the limits of trust in runs: outputs that nothing checked, and the emulator."""
    unchecked = sum(run.check.outcome != "passed" for run in runs)
    if unchecked:
        sessions = pluralize(len(runs), "session")
        yield f"the output of {unchecked} of {sessions} was compared with nothing"
    virtual = [run.workload.runtime for run in runs if run.device.emulator]
    if virtual:
        yield emulator_notice(virtual)
