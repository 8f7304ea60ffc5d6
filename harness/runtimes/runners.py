"""Runner programs: the SDK's, or ours of the same flags in Python."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from harness.results.records import Runner
from harness.runtimes.libraries.base import GenieLibraries

Program = Literal["genie-t2t-run", "genie-t2e-run", "genie-app"]
_OURS: Mapping[Program, Runner] = MappingProxyType(
    {
        "genie-t2t-run": "genie_t2t_run.py",
        "genie-t2e-run": "genie_t2e_run.py",
        "genie-app": "genie_app.py",
    }
)
# Files of a run are links into the store, and Python looks for modules where a link leads. It
# writes no bytecode: on a full disk that would be cut off, and the next start fail to read it.
_PYTHON = ("env", "PYTHONPATH=.", "PYTHONDONTWRITEBYTECODE=1", "python3")


def runner_of(program: Program, genie: GenieLibraries) -> Runner:
    """Return the runner of a documented program: itself where it exists, else ours."""
    return program if program in genie.programs else _OURS[program]


def runner_command(runner: Runner) -> tuple[str, ...]:
    """Return the command that starts a runner in a run folder, without its options."""
    return (*_PYTHON, runner) if runner.endswith(".py") else (f"./{runner}",)
