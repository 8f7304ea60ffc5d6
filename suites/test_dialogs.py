"""Conversations of several turns, in one process and one Genie dialog on the device."""

import pytest

from harness.runtimes.tokenizer import encode, load_tokenizer
from harness.workloads.session import Session
from suites.answers import hold, limit_of
from suites.parameters import SuiteParameters

_NEW_TOKENS = 4
_FEWEST = 2
_TURNS = ("In the beginning", "And the earth was", "And God said", "And there was light")


@pytest.fixture
def turns(session: Session, suite_parameters: SuiteParameters) -> tuple[str, ...]:
    """As many turns as the context has room for with their answers."""
    tokenizer = load_tokenizer(session.model.tokenizer)
    length, turns = 1, []
    for turn in _TURNS[: suite_parameters.turns]:
        length += len(encode(tokenizer, turn)) + _NEW_TOKENS
        if length > limit_of(session).longest_prompt:
            break
        turns.append(turn)
    if len(turns) < _FEWEST:
        pytest.skip(f"the context has no room for {_FEWEST} turns")
    return tuple(turns)


def test_every_turn_is_answered(session: Session, turns: tuple[str, ...]) -> None:
    """No turn ends empty."""
    (answers,) = hold(session, [turns], _NEW_TOKENS).answers
    silent = [turn for turn, answer in zip(turns, answers, strict=True) if not answer.strip()]
    assert not silent, f"no answer to {silent}"


def test_a_reset_forgets_everything(session: Session, turns: tuple[str, ...]) -> None:
    """After a reset the same conversation goes the same way."""
    result = hold(session, [turns, turns], _NEW_TOKENS)
    assert result.answers[0] == result.answers[1]


def test_a_turn_sees_the_turns_before(session: Session, turns: tuple[str, ...]) -> None:
    """Earlier turns change at least one of the later answers."""
    alone = [(turn,) for turn in turns]
    result = hold(session, [turns, *alone], _NEW_TOKENS)
    together, single = result.answers[0], [answers[0] for answers in result.answers[1:]]
    assert together[0] == single[0]
    assert list(together[1:]) != single[1:], "every turn is answered as if it were the first"
