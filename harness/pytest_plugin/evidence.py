"""What is kept of the devices of a test that failed: their logs, the runner's, and telemetry."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import HarnessError, one_line

if TYPE_CHECKING:
    from harness.devices.base import Device
    from harness.pytest_plugin.running import ContainerRunner
    from harness.pytest_plugin.state import TestState
    from harness.results.records import TelemetrySeries

_LOG_BYTES = 200_000
_SHOWN_LINES = 40
_TIMEOUT_S = 20.0
_SYSTEM_LOG = (
    "if command -v logcat >/dev/null 2>&1; then logcat -d -t 500 -v threadtime 2>&1; "
    "elif ! command -v getprop >/dev/null 2>&1; then dmesg 2>&1 | tail -n 500; "
    "else echo 'this Android has no logcat'; fi"
)


Section = tuple[str, str]
"""A section of a test's report: its title, and text that any report can hold."""


def collect(test: "TestState", name: str) -> tuple[Path, list[Section]]:
    """Read the logs while the lease still holds, and write them whole into a folder of the test.

    A device that cannot be asked has that as its section.

    Returns:
        The folder, and what a report shows.
    """
    folder = test.folder(name)
    sections: list[Section] = []
    for device in test.held.lease.devices:
        for title, text in _of_device(device, [r for r in test.runners if r.device is device]):
            path = folder / f"{_file_name(device.serial)}-{title.replace(' ', '-')}"
            path.write_text(text, encoding="utf-8", errors="replace")
            sections.append((f"{title} of {device.serial}", _tail(text, path)))
    return folder, sections


def _of_device(device: "Device", runners: "list[ContainerRunner]") -> Iterator[tuple[str, str]]:
    for number, runner in enumerate(runners):
        mark = f" {number}" if number else ""
        yield f"runner log{mark}", _runner_log(runner)
        if runner.telemetry:
            yield f"telemetry{mark}.csv", as_csv(runner.telemetry)
    yield "system log", _system_log(device)


def as_csv(series: "Sequence[TelemetrySeries]") -> str:
    """Long form: a line for each sample that there is."""
    lines = ["channel,unit,t_s,value"]
    for one in series:
        channel = one.channel.replace(",", ";")
        for moment, value in zip(one.t_s, one.values, strict=True):
            if value is not None:
                lines.append(f"{channel},{one.unit},{moment:.2f},{value:.12g}")
    return "\n".join([*lines, ""])


def _runner_log(runner: "ContainerRunner") -> str:
    if runner.deployment is None:
        return "nothing was deployed"
    command = ["tail", "-c", str(_LOG_BYTES), f"{runner.deployment.run_dir}/run.log"]
    return _read(runner.device, command)


def _system_log(device: "Device") -> str:
    return _read(device, _SYSTEM_LOG)


def _read(device: "Device", command: str | list[str]) -> str:
    try:
        result = device.shell(command, timeout_s=_TIMEOUT_S, check=False, max_output=_LOG_BYTES)
    except HarnessError as error:
        return f"cannot be read: {error}"
    return result.stdout or result.stderr or "(empty)"


def _tail(text: str, path: Path) -> str:
    lines = text.splitlines()
    shown = [one_line(line, 400) for line in lines[-_SHOWN_LINES:]]
    head = f"the last {_SHOWN_LINES} of {len(lines)} lines; " if len(lines) > _SHOWN_LINES else ""
    return "\n".join([f"{head}all in {path}", *shown])


def _file_name(serial: str) -> str:
    return "".join(c if c.isalnum() or c in ".-_" else "_" for c in serial)[:80]
