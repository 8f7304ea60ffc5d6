"""`qnnfarm debug kv`: the rows of graph calls that Genie keeps, rightly or not."""

import json

from buildlib.builder.genie_check import random_text
from buildlib.container.container import GenAIContainer
from harness.exit_codes import BAD, GOOD
from tests.harness.cli.conftest import Run

WRONG = ": not its accepted rows"
ASKED = ("--prompt", random_text(0, 6), "--max-tokens", "4")


def test_a_draft_that_is_never_rejected_is_kept_rightly(
    qnnfarm: Run, checked_dialogs: dict[str, GenAIContainer]
) -> None:
    done = qnnfarm("debug", "kv", checked_dialogs["right"].path, *ASKED, "--json")
    assert done.returncode == GOOD, done.stderr
    told = json.loads(done.stdout)
    assert told["text"]
    assert len(told["commits"]) > 2
    assert {call["engine"] for call in told["calls"]} == {0, 1}
    assert all(one["sound"] for one in told["commits"])


def test_rejected_rows_and_a_warm_up_are_kept_wrongly(
    qnnfarm: Run, checked_dialogs: dict[str, GenAIContainer]
) -> None:
    """Once a wheel mends one of them, this fails, and its refusal has ended before."""
    for kind in ("spd", "lade"):
        shown = qnnfarm("debug", "kv", checked_dialogs[kind].path, *ASKED)
        assert shown.returncode == BAD, shown.stderr
        assert WRONG in shown.stdout
