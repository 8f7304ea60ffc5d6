"""What Genie keeps in its KV cache: the evidence for what is refused, and for what is not."""

from pathlib import Path

import pytest

from buildlib.container.container import GenAIContainer
from buildlib.pipeline.genie_check import make_dialog, random_text
from buildlib.speculative.config import LadeBuilderConfig, PlainDialog, speculate
from buildlib.speculative.kv_trace import find_commits, trace_dialog
from buildlib.targets import parse_target

PROMPT = "In the beginning"


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


def test_lookahead_keeps_the_rows_of_its_warm_up(tiny_bundle: Path) -> None:
    """Once a wheel mends it, this fails, and the refusal has ended before."""
    container = GenAIContainer.load(tiny_bundle)
    target, tokenizer = parse_target("SM8750:emulator"), container.files["tokenizer.json"]
    speaker = PlainDialog(container.genie_config, target, tokenizer)
    how = LadeBuilderConfig(window=4, ngram=3, gcap=4)
    config = speculate(speaker, how, (1, 32)).genie_config.with_dialog(context_size=40)
    _, calls = trace_dialog(container.path, config, PROMPT)
    assert not all(one.is_sound for one in find_commits(calls, config))


@pytest.mark.slow
@pytest.mark.needs("libatomic1")
def test_a_drafted_dialog_keeps_rejected_rows(tmp_path: Path) -> None:
    """After a rejection the target's cache gets the last rows of a call, not the first."""
    folder, config = make_dialog("spd", tmp_path)
    dialog = config.with_dialog(max_num_tokens=6)
    _, calls = trace_dialog(folder, dialog, random_text(0, 6))
    wrong = [one for one in find_commits(calls, config) if not one.is_sound]
    assert wrong
    assert all(one.columns for one in wrong)
