"""What the plugin remembers of a pytest process and of each test."""

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.pytest_plugin.keeper import Held, LeaseKeeper
from harness.pytest_plugin.options import read_settings

if TYPE_CHECKING:
    from harness.pytest_plugin.running import ContainerRunner
    from harness.results.records import RunStatus

KEEPER = pytest.StashKey[LeaseKeeper]()
TEST = pytest.StashKey["TestState"]()
RUN = pytest.StashKey[str]()
ROWS = pytest.StashKey[list[dict[str, object]]]()
"""Rows of the table at the end of the session, as `harness.pytest_plugin.summary` reads them."""


@dataclass
class TestState:
    """A test that holds devices.

    Attributes:
        folder: where files about its failure go; made on first use.
        runners: what ran containers in it.
        ended: whether the test itself is over; Ctrl-C in the middle of it is no end.
        failure: the text of what went wrong in it, expected or not; empty while nothing did.
    """

    __test__ = False

    held: Held
    temporary: "pytest.TempPathFactory"
    runners: "list[ContainerRunner]" = field(default_factory=list)
    ended: bool = False
    failure: str = ""

    @property
    def status(self) -> "RunStatus":
        """Of a run that the test is."""
        return "failed" if self.failure else "done" if self.ended else "interrupted"

    def folder(self, name: str) -> Path:
        """A new folder for the files of a failure."""
        plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)[:60]
        return self.temporary.mktemp(f"qnnfarm-{plain}")


def run_uid(config: pytest.Config) -> str:
    """The same in all processes of one run of pytest, and in no other run."""
    shared = getattr(config, "workerinput", {}).get("testrunuid")
    return str(shared or config.stash.setdefault(RUN, uuid.uuid4().hex))


def keeper_of(config: pytest.Config) -> LeaseKeeper:
    """The one keeper of this process; its leases end with the session at the latest."""
    if KEEPER not in config.stash:
        keeper = LeaseKeeper(read_settings(config))
        config.stash[KEEPER] = keeper
        config.add_cleanup(keeper.close)
    return config.stash[KEEPER]
