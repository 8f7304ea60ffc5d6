"""Pytest runs of users, with real virtual devices."""

import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.devices.adb.client import AdbServer
from tests.system import VIRTUAL, needs


@dataclass(frozen=True)
class Outcome:
    """How a run of pytest ended."""

    returncode: int
    output: str
    junit: Path

    def cases(self) -> dict[str, ET.Element]:
        """Each test by its name."""
        root = ET.parse(self.junit).getroot()  # noqa: S314 - what pytest wrote just now
        return {case.attrib["name"]: case for case in root.iter("testcase")}

    def counts(self) -> dict[str, int]:
        """Failures, errors, skips and tests, as junit counts them; zeros are left out."""
        suite = next(ET.parse(self.junit).getroot().iter("testsuite"))  # noqa: S314 - see above
        keys = ("tests", "failures", "errors", "skipped")
        return {key: int(suite.attrib[key]) for key in keys if int(suite.attrib[key])}

    def properties(self, name: str) -> dict[str, str]:
        """The properties of one test."""
        found = self.cases()[name].iter("property")
        return {entry.attrib["name"]: entry.attrib["value"] for entry in found}


Farm = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def plugins_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the other plugins of this environment, which take a second of each process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def options(folder: Path) -> list[str]:
    """Of a user's pytest; those of this project do not apply in their folder."""
    return [
        "-p", "xdist", "-p", "harness.pytest_plugin", "-p", "no:cacheprovider", "-W", "error",
        # In this process our packages are imported already.
        "-W", "ignore::pytest.PytestAssertRewriteWarning", f"--rootdir={folder}",
        f"--junit-xml={folder / 'junit.xml'}", f"--basetemp={folder / 'tmp'}",
    ]  # fmt: skip


def command(folder: Path, *arguments: str | Path) -> list[str]:
    """The same in a process of its own."""
    return [sys.executable, "-m", "pytest", *options(folder), *map(str, arguments)]


@pytest.fixture
def farm(
    pytester: pytest.Pytester, adb_server: AdbServer, adb_environment: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Farm:  # fmt: skip
    """Runs tests, given as a text, under the plugin; in this process, which has all loaded."""
    pytester.makeini("[pytest]\n")
    monkeypatch.setenv("HOME", str(adb_environment))  # pytester's has no key of adb

    def run(text: str, *arguments: str | Path) -> Outcome:
        pytester.makepyfile(test_it=text)
        done = pytester.runpytest_inprocess(*options(pytester.path), *map(str, arguments))
        output = f"{done.stdout.str()}\n{done.stderr.str()}"
        return Outcome(int(done.ret), output, pytester.path / "junit.xml")

    return run


@pytest.fixture(scope="session")
def two_devices(adb_server: AdbServer) -> Iterator[tuple[str, str]]:
    """Names of two virtual devices that all tests share but those that break theirs."""
    names = (f"plugin-a{os.getpid()}", f"plugin-b{os.getpid()}")
    needs(VIRTUAL)
    from plugins.virtual_android import manager

    for name in names:
        adb_server.connect(manager.start(name, "SM8750").serial)
    yield names
    for name in names:
        serial = manager.get(name).serial
        manager.remove(name)
        adb_server.disconnect(serial)
