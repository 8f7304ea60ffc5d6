"""The runner of a container's graphs, as a device starts it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from plugins.diagnosis import on_device
from tests.device_scripts.conftest import SCRIPTS, Runner
from tests.device_scripts.conftest import runner as genie_runner

__all__ = ["genie_runner"]

ON_DEVICE = Path(on_device.__file__).parent
# A device has all scripts in one folder.
sys.path.insert(0, str(ON_DEVICE))


@dataclass(frozen=True)
class GraphRunner(Runner):
    """Starts our program for graphs."""

    def command(self, script: str, arguments: Sequence[str | Path]) -> list[str]:
        folder = ON_DEVICE if (ON_DEVICE / script).exists() else SCRIPTS
        return [sys.executable, str(folder / script), *map(str, arguments)]


@pytest.fixture(scope="session")
def runner(genie_runner: Runner) -> Runner:
    return GraphRunner({**genie_runner.environment, "PYTHONPATH": f"{SCRIPTS}:{ON_DEVICE}"})
