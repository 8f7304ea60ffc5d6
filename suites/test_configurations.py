"""Do all graphs of a container, and other Genie configurations of its files, do what they say?"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.runtimes.tokenizer import encode, load_tokenizer
from harness.workloads.bench_prompt import cut_prompt
from harness.workloads.session import Session
from suites.answers import ask, limit_of

_PROMPT = "In the beginning"
_NEW_TOKENS = 8
_STREAMS = 3
_RESERVED_TOKENS = 4
_MOST_SLIDING = 1024
"""Tokens that one query generates: a minute on a phone."""

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def basic(session: Session) -> Session:
    """The container, if its dialog is the one that the other configurations are made of."""
    kind = session.container.genie_config.dialog.type
    if kind != "basic":
        pytest.skip(f"a dialog of type {kind} takes no other configurations")
    return session


@pytest.fixture
def configured(basic: Session, tmp_path: Path) -> Callable[[Edit], str]:
    """Writes another `genie_config.json` for the container's files."""

    def configure(edit: Edit) -> str:
        document = json.loads(basic.container.genie_config.to_json())
        edit(document["dialog"])
        (tmp_path / "other.json").write_text(json.dumps(document))
        return str(tmp_path / "other.json")

    return configure


def _ids(
    session: Session,
    prompt: tuple[int, ...],
    new_tokens: int = _NEW_TOKENS,
    genie_config: str | None = None,
) -> tuple[int, ...]:
    """Return the answer to token ids."""
    result = ask(session, tokens=prompt, max_tokens=new_tokens, genie_config=genie_config)
    if result.token_ids is None:
        pytest.skip("the program on the device prints no token ids")
    return result.token_ids


def _prompt(session: Session, tokens: int) -> tuple[int, ...]:
    """Return a prompt of so many tokens, of which Genie adds the first."""
    return cut_prompt(session.model.tokenizer, tokens - 1).token_ids


def _end_at(dialog: dict[str, Any], tokens: list[int]) -> None:
    dialog["context"]["eos-token"] = tokens


def test_every_graph_goes_on_alike(basic: Session) -> None:
    """A prompt with the start of its answer gets the rest, for each AR and across each CL."""
    graphs = basic.container.metadata.graphs
    if len(graphs.auto_regression_numbers) * len(graphs.context_lengths) == 1:
        pytest.skip("the container has one graph")
    half = _NEW_TOKENS // 2
    ends = (length - half for length in graphs.context_lengths[:-1])
    limit = limit_of(basic)
    most = min(limit.longest_prompt - half, limit.context_length - _NEW_TOKENS)
    lengths = {min(max(n, 2), most) for n in (*graphs.auto_regression_numbers, *ends)}
    for length in sorted(lengths):
        prompt = _prompt(basic, length)
        whole = _ids(basic, prompt)
        if len(whole) > half:
            rest = _ids(basic, prompt + whole[:half], len(whole) - half)
            assert rest == whole[half:], f"after a prompt of {length} tokens"


def test_a_list_of_eos_tokens_ends_the_answer(
    basic: Session, configured: Callable[[Edit], str]
) -> None:
    """The answer ends before each token of the list, wherever it stands there."""
    prompt = _prompt(basic, _NEW_TOKENS)
    whole = _ids(basic, prompt)
    last = next((i for i, token in enumerate(whole) if token not in whole[:1]), None)
    if last is None:
        pytest.skip(f"the answer {list(whole)} has no second token to end at")
    own = basic.container.genie_config.dialog.context.eos_token
    others = own if isinstance(own, tuple) else (own,)
    for tokens in ([*others, whole[last]], [whole[last], *others]):
        edit = partial(_end_at, tokens=tokens)
        assert _ids(basic, prompt, genie_config=configured(edit)) == whole[:last]


def test_a_sliding_window_outgrows_the_context(
    basic: Session, configured: Callable[[Edit], str]
) -> None:
    """Twice the context length is generated.

    Of a long context, `_MOST_SLIDING` tokens, after a prompt that is long enough to outgrow it.
    """
    length, longest = limit_of(basic).context_length, limit_of(basic).longest_prompt
    new_tokens = min(2 * length, _MOST_SLIDING)
    prompt = _prompt(basic, min(max(length - new_tokens // 2, _NEW_TOKENS), longest))

    def slide(dialog: dict[str, Any]) -> None:
        context = dialog["context"]
        context["size"] = len(prompt) + 1 + new_tokens
        if context["bos-token"] >= 0:
            context["eos-token"] = context["bos-token"]  # no model says it: the answer goes on
        dialog["engine"]["longcontext"] = {
            "version": 1,
            "type": "sliding-window",
            "reserved-tokens": _RESERVED_TOKENS,
            "sliding-window": {"version": 1, "window-size": max(length // 3, 1)},
        }

    tokens = _ids(basic, prompt, new_tokens, configured(slide))
    if len(prompt) + len(tokens) < longest:
        pytest.skip(f"the model ends its answer after {len(tokens)} tokens")
    assert len(tokens) == new_tokens


def test_every_stream_is_answered(basic: Session, configured: Callable[[Edit], str]) -> None:
    """A `multistream` dialog gives as many answers as asked for; one begins as the greedy one."""
    block = {"version": 1, "n-streams": _STREAMS, "p-threshold": 0.0}
    config = configured(lambda dialog: dialog.update(type="multistream", multistream=block))
    tokenizer = load_tokenizer(basic.model.tokenizer)
    needed = 1 + len(encode(tokenizer, _PROMPT)) + _STREAMS * _NEW_TOKENS
    longest = limit_of(basic).longest_prompt
    if needed > longest:
        pytest.skip(f"{_STREAMS} streams need {needed} tokens of {longest}")
    streams = ask(basic, _PROMPT, max_tokens=_NEW_TOKENS, genie_config=config).streams
    assert len(streams) == len(set(streams)) == _STREAMS
    first = ask(basic, _PROMPT, max_tokens=1).text.strip()
    assert any(stream.strip().startswith(first) for stream in streams), (first, streams)
