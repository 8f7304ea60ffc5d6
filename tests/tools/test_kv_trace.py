"""What Genie keeps in its KV cache: the evidence for what is refused, and for what is not."""

from pathlib import Path

import pytest

from buildlib.builder.genie_check import random_text
from buildlib.container.container import GenAIContainer
from buildlib.container.genie_decoding import Ssd
from tools.kv_trace import GraphCall, find_commits, main, trace_dialog

pytestmark = pytest.mark.first
PROMPT = "In the beginning"
WRONG = ": not its accepted rows"
TREE = ((0,), (0, 1), (0, 2), (0, 2, 3))
"""Of four rows: 1 and 2 are candidates after 0, and 3 comes after 2."""


def call(
    number: int,
    columns: dict[int, tuple[int, int] | None],
    engine: int = 0,
    *,
    drafts: bool = False,
) -> GraphCall:
    return GraphCall(number, engine, "g", None, (None,) * 4, TREE, drafts, columns)


@pytest.mark.parametrize(
    ("kept", "is_sound"),
    [
        ({0: (1, 0)}, True),
        ({0: (1, 0), 1: (1, 2), 2: (1, 3)}, True),
        ({}, True),
        ({0: (1, 1)}, False),  # not from the first on
        ({0: (1, 0), 1: (1, 1), 2: (1, 2)}, False),  # two branches
        ({0: (1, 0), 1: (1, 3)}, False),  # a gap
        ({0: (1, 0), 1: (0, 2)}, False),  # of a call before
        ({0: None}, False),  # of no call
    ],
)
def test_what_is_kept_is_one_branch_of_the_call_before(
    kept: dict[int, tuple[int, int] | None], is_sound: bool, tiny_bundle: Path
) -> None:
    config = GenAIContainer.load(tiny_bundle).genie_config
    calls = [call(1, {}), call(2, {}, engine=1, drafts=True), call(3, kept)]
    calls += [call(4, {0: None}, engine=1, drafts=True)]  # of a draft head
    (found,) = find_commits(calls, config)
    assert (found.call.number, found.columns, found.is_sound) == (1, kept, is_sound)
    moved = {column + 16: origin for column, origin in kept.items()}
    ssd = Ssd(forecast_token_count=4, branches=(3,), forecast_prefix=16, forecast_prefix_name="p")
    calls = [call(1, {0: None}), call(3, {0: None, 3: None, **moved})]
    (found,) = find_commits(calls, config.with_type("ssd-q1", ssd=ssd))
    assert (found.columns, found.is_sound) == (moved, is_sound)


def test_a_plain_dialog_keeps_each_token_it_was_fed(tiny_bundle: Path) -> None:
    config = GenAIContainer.load(tiny_bundle).genie_config.with_dialog(max_num_tokens=4)
    text, calls = trace_dialog(tiny_bundle, config, PROMPT)
    prefill, *steps = calls
    assert text
    assert not prefill.columns
    assert prefill.ids is not None
    fed = prefill.positions.index(0, 1)  # rows behind the prompt are padding
    assert prefill.positions[:fed] == tuple(range(fed))
    assert [step.positions for step in steps] == [(fed + n,) for n in range(3)]
    first, *later = find_commits(calls, config)
    assert list(first.columns.items()) == [(n, (1, n)) for n in range(fed)]
    assert [list(one.columns.items()) for one in later] == [[(fed, (2, 0))], [(fed + 1, (3, 0))]]
    assert all(one.is_sound for one in (first, *later))


@pytest.mark.variant
def test_a_draft_that_is_never_rejected_is_kept_rightly(
    checked_dialogs: dict[str, GenAIContainer], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(checked_dialogs["right"].path)
    assert main([folder, "--prompt", random_text(0, 6), "--max-tokens", "4"]) == 0
    told = capfd.readouterr().out
    assert {"engine 0", "engine 1"} <= {
        line.split(": ")[-1].split(",")[0] for line in told.splitlines()
    }
    assert told.count("  added  ") > 2
    assert WRONG not in told


@pytest.mark.parametrize("kind", ["spd", pytest.param("lade", marks=pytest.mark.variant)])
def test_rejected_rows_and_a_warm_up_are_kept_wrongly(
    kind: str, checked_dialogs: dict[str, GenAIContainer], capfd: pytest.CaptureFixture[str]
) -> None:
    """Once a wheel mends one of them, this fails, and its refusal has ended before."""
    folder = str(checked_dialogs[kind].path)
    assert main([folder, "--prompt", random_text(0, 6), "--max-tokens", "4"]) == 1
    assert WRONG in capfd.readouterr().out
