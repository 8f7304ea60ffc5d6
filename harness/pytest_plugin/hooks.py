"""Hooks of the plugin; they cost a test without devices next to nothing."""

import sys
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

from harness.pytest_plugin import terminal
from harness.pytest_plugin.items import (
    LEASE_FIXTURE,
    PATH_FIXTURE,
    ROWS,
    SESSION_FIXTURE,
    SESSION_ID,
    uses_device,
)
from harness.pytest_plugin.options import add_options, read_settings, without_password

_MARKER = (
    "device(soc=None, hexagon=None, type=None, name=None, tags=(), free_bytes=0, count=1): what "
    "the devices of a test must be; tests for which there are none are skipped (qnnfarm)."
)
_PACKAGES = [Path(__file__).parents[2] / name for name in ("buildlib", "harness", "plugins")]
_PROPERTIES = pytest.StashKey[Iterable[tuple[str, object]]]()
"""Properties that a test had before it ran."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options and ini settings."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, check the options, and register the plugin's reporters."""
    config.addinivalue_line("markers", _MARKER)
    settings, option = read_settings(config), config.option
    if settings.loads_more or option.qnnfarm_pool or option.qnnfarm_db:
        from harness.pytest_plugin.option_checks import check_options

        check_options(config, settings)
    config.pluginmanager.register(terminal.TestReports(config), "qnnfarm-reports")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(terminal.UsageErrors(), "qnnfarm-usage-errors")
        if settings.baseline:
            from harness.pytest_plugin.baseline import BaselineGate

            gate = BaselineGate(settings.db or "", settings.baseline)
            config.pluginmanager.register(gate, "qnnfarm-baseline")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Show the requested devices, containers and results store."""
    settings = read_settings(config)
    values = {
        "pool": "" if settings.pool is None else str(settings.pool),
        "devices": ", ".join(settings.devices),
        "containers": ", ".join(map(str, settings.containers)),
        "results": without_password(settings.db or ""),
    }
    words = [f"{name} {value}" for name, value in values.items() if value]
    return [f"qnnfarm: {'; '.join(words)}"] if words else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once with each container, and `--repeat` times where it uses a device."""
    names = metafunc.fixturenames
    if LEASE_FIXTURE not in names and "container" not in names:
        return
    settings = read_settings(metafunc.config)
    if PATH_FIXTURE in names and _is_ours(metafunc, "container") and settings.containers:
        paths = settings.containers
        metafunc.parametrize(PATH_FIXTURE, paths, indirect=True, ids=[p.name for p in paths])
    if LEASE_FIXTURE in names and settings.repeat > 1:
        # In the order of sessions, so that a slow drift does not look like a difference of tests.
        metafunc.parametrize(
            SESSION_FIXTURE,
            range(settings.repeat),
            indirect=True,
            ids=[f"{SESSION_ID}{number + 1}" for number in range(settings.repeat)],
            scope="session",
        )


def _is_ours(metafunc: pytest.Metafunc, name: str) -> bool:
    """Return whether a fixture is this plugin's, not one of the project."""
    manager = metafunc.definition.session._fixturemanager  # noqa: SLF001 - no public way
    definitions = manager.getfixturedefs(name, metafunc.definition) or ()
    return bool(definitions) and definitions[-1].func.__module__ == "harness.pytest_plugin.fixtures"


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """Check markers, so that a wrong one is a collection error of its file."""
    items = yield
    for item in items if isinstance(items, list) else ():
        if isinstance(item, pytest.Item) and uses_device(item):
            from harness.pytest_plugin.marker import check_marker

            check_marker(item)
    return items


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget the properties of an earlier try of the test: JUnit has those of the last one."""
    item.user_properties[:] = item.stash.setdefault(_PROPERTIES, tuple(item.user_properties))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Word our errors for users, and add a test's rows of the table to its report."""
    if call.excinfo is not None and not item.config.option.fulltrace:
        _hide_own_frames(call.excinfo)
    report = yield
    if call.when == "teardown" and (rows := item.stash.get(ROWS, None)):
        setattr(report, terminal.ROWS, rows)
    return report


def _hide_own_frames(excinfo: "pytest.ExceptionInfo[BaseException]") -> None:
    """End the traceback of an error of ours in the code of the user: its text says what failed."""
    if not _is_own_error(excinfo):
        return
    for entry in excinfo.traceback:
        if any(Path(entry.path).is_relative_to(folder) for folder in _PACKAGES):
            entry.frame.f_globals.setdefault("__tracebackhide__", _is_own_error)


def _is_own_error(excinfo: "pytest.ExceptionInfo[BaseException]") -> bool:
    errors = sys.modules.get("harness.errors")  # without it, nothing of ours has failed
    return errors is not None and isinstance(excinfo.value, errors.HarnessError)


def pytest_report_teststatus(report: object) -> tuple[str, str, str] | None:
    """Show a test that lost its device as `DEVICE LOST`, but as a rerun if it runs again."""
    lost = getattr(report, terminal.LOST, False) and getattr(report, "outcome", "") == "failed"
    return ("error", "E", "DEVICE LOST") if lost else None
