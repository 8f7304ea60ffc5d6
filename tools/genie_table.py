"""Write the table of docs/genie-configurations.md: `python3 -m tools.genie_table`.

Whether a documented configuration runs on the emulator is what the tests say that carry its name in
the marker `genie_configuration`: they are run here, which takes minutes.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildlib.container.genie_config import GenieConfig
from buildlib.container.genie_limits import find_limits
from buildlib.container.text_embedding import TextEmbeddingConfig
from buildlib.paths import default_cache_root
from plugins.diagnosis.genie_files import ConfigKind, kind_of
from tests.buildlib.container.genie_configurations import (
    EXTENSIONS,
    Configuration,
    configurations,
)

MARKER = "genie_configuration"
_ROOT = Path(__file__).resolve().parents[1]
_DOCUMENT = _ROOT / "docs" / "genie-configurations.md"
BEGIN, END = "<!-- written by tools/genie_table.py -->", "<!-- end of the table -->"
_HEADER = ("configuration", "runs on the emulator", "needs hardware")


class Recorder:
    """Pytest plugin that keeps whether all tests of a configuration passed, by its name."""

    def __init__(self) -> None:
        self.ran: dict[str, bool] = {}
        self._names: dict[str, tuple[str, ...]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note the names in the markers of the tests that are to run."""
        for item in items:
            names = (name for mark in item.iter_markers(MARKER) for name in mark.args)
            self._names[item.nodeid] = tuple(names)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome; what is skipped did not run."""
        failed = report.outcome == "failed"
        if failed or (report.when == "call" and report.outcome == "passed"):
            for name in self._names.get(report.nodeid, ()):
                self.ran[name] = self.ran.get(name, True) and not failed


def run_marked() -> dict[str, bool]:
    """Run the tests with the marker; whether all of them passed, by configuration."""
    command = ["git", "grep", "-l", f"mark.{MARKER}", "--", "tests", "suites"]
    found = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True).stdout
    recorder = Recorder()
    imported = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    chosen = ["-n", "0", "-q", "-W", imported, "-m", MARKER, *sorted(found.split())]
    pytest.main(chosen, plugins=[recorder])
    return recorder.ran


def rows(ran: dict[str, bool]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table.

    Args:
        ran: whether the tests of a configuration passed; those without tests are not in it.
    """
    for each in (*configurations(), EXTENSIONS):
        kind = kind_of(json.dumps(each.values).encode(), each.name)
        hardware = needed_hardware(each, kind)
        outcome = {True: "yes", False: "fails", None: ""}[ran.get(each.name)]
        yield each.name, "no" if hardware else outcome, hardware


def needed_hardware(configuration: Configuration, kind: ConfigKind) -> str:
    """Return why the emulator cannot run a configuration; empty if nothing is known against it."""
    config = kind.model.from_json(json.dumps(configuration.values))
    if not isinstance(config, GenieConfig | TextEmbeddingConfig):
        return ""
    if isinstance(config, GenieConfig) and config.dialog.type in ("spd", "lade"):
        from plugins.speculation.genie_check import check_genie

        found = check_genie(config.dialog.type, default_cache_root())
        # Not `refusal`, whose count of texts varies with the guesses of lookahead.
        wrong = f"another Genie: {found.genie} gives other texts than plain decoding"
        return "" if found.agrees else wrong
    limits = find_limits(config, emulator=True)
    return "; ".join(dict.fromkeys(f"{limit.feature} {limit.reason}" for limit in limits))


def main() -> int:
    """Run the tests, and write the table; the number of tests that failed is the answer."""
    ran = run_marked()
    unknown = sorted(ran.keys() - {each.name for each in (*configurations(), EXTENSIONS)})
    if unknown:
        print(f"no documented configuration is called {unknown[0]!r}", file=sys.stderr)
        return 2
    lines = [f"| {' | '.join(cells)} |" for cells in (_HEADER, ["---"] * 3, *rows(ran))]
    text = _DOCUMENT.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    _DOCUMENT.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]), "utf-8")
    failed = [name for name, passed in ran.items() if not passed]
    print(f"{len(ran)} configurations ran, {len(failed)} failed; wrote {_DOCUMENT}")
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
