"""Log-likelihoods of choices and their scores, against sums and formulas written out."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.runtimes.tokenizer import encode, load_tokenizer
from plugins.evaluation.choices import EncodedQuestion, encode_question
from plugins.evaluation.scores import AnswerChecks, ChoiceScores, score_answers, score_choices
from suites.models import tiny_llama

VOCABULARY = 7
CHOICES = st.lists(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4).map(tuple),
    min_size=2,
    max_size=5,
)


def logits_after(tokens: Sequence[int]) -> np.ndarray:
    """A model of its own: logits that depend on all tokens before."""
    seed = hash(tuple(tokens)) % 2**32
    return np.random.default_rng(seed).normal(0, 3, VOCABULARY).astype(np.float32)


@given(CHOICES)
def test_shared_windows_give_each_choice_its_own_log_likelihood(
    choices: list[tuple[int, ...]],
) -> None:
    question = EncodedQuestion((1, 2), tuple(choices), (1,) * len(choices), 0)
    logits = [
        np.stack(
            [
                logits_after((*window.prompt, *window.following[:step]))
                for step in range(len(window.following))
            ]
        )
        for window in question.windows
    ]
    found = question.scores(logits).log_likelihoods
    for choice, value in zip(choices, found, strict=True):
        expected = 0.0
        for step, token in enumerate(choice):
            row = logits_after((1, 2, *choice[:step])).astype(float)
            expected += row[token] - math.log(sum(map(math.exp, row)))
        assert value == pytest.approx(expected, abs=1e-9)
    assert len(question.windows) <= len(set(choices))


@pytest.mark.parametrize("bad", [np.full((1, 7), np.nan), np.zeros((0, 7)), np.zeros((1, 3))])
def test_other_logits_than_those_of_the_steps_are_refused(bad: np.ndarray) -> None:
    question = EncodedQuestion((1,), ((2,), (5,)), (1, 1), 0)
    (window,) = question.windows  # letters share one step
    assert len(window.following) == 1
    with pytest.raises(ValueError, match="logits"):
        question.scores([bad.astype(np.float32)])


def test_a_choice_is_encoded_as_what_follows_the_prompt() -> None:
    tokenizer = load_tokenizer(tiny_llama.folder() / "tokenizer.json")
    question = encode_question(tokenizer, "And God said, ", ("let there", "no"), 1)
    assert list(question.prompt) == encode(tokenizer, "And God said,")
    whole = encode(tokenizer, "And God said,  let there")
    assert [*question.prompt, *question.choices[0]] == whole
    assert question.lengths == (9, 2)
    chat = encode_question(tokenizer, "said:\n", ("let", "é"), 0, chat=True)
    assert [*chat.prompt, *chat.choices[0]] == encode(tokenizer, "said:\nlet")
    assert (chat.lengths, chat.bos) == ((3, 2), False)
    with pytest.raises(ValueError, match="the prompt has no token"):
        encode_question(tokenizer, " ", ("a", "b"), 0)


ROWS = st.lists(
    st.builds(
        lambda values, lengths, answer: ChoiceScores(tuple(values), tuple(lengths), answer),
        st.lists(st.floats(-50, 0), min_size=3, max_size=3),
        st.lists(st.integers(1, 30), min_size=3, max_size=3),
        st.integers(0, 2),
    ),
    min_size=2,
    max_size=30,
)


@given(ROWS)
def test_scores_are_those_of_lm_evaluation_harness(rows: list[ChoiceScores]) -> None:
    """Its `process_results` of multiple choice, and `mean_stderr`."""
    hits, by_byte = [], []
    for row in rows:
        values = np.array(row.log_likelihoods)
        hits.append(float(np.argmax(values) == row.answer))
        by_byte.append(float(np.argmax(values / np.array(row.lengths, float)) == row.answer))
    scores = score_choices(rows, rows)
    for key, found in (("accuracy", hits), ("accuracy_norm", by_byte)):
        mean = sum(found) / len(found)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in found) / (len(found) - 1))
        assert scores[key] == pytest.approx(mean)
        assert scores[f"{key}_error"] == pytest.approx(deviation / math.sqrt(len(found)))
        assert scores[f"{key}_float"] == scores[key]
    assert scores["choice_agreement"] == 1
    assert score_choices(rows[:1]).keys() == {"accuracy", "accuracy_norm"}  # which has no error


def test_prompts_and_instructions_are_counted_apart() -> None:
    rows = [AnswerChecks((True, False), (True, True)), AnswerChecks((True,), (True,))]
    scores = score_answers(rows)
    assert scores["prompts_strict"] == 0.5
    assert scores["instructions_strict"] == pytest.approx(2 / 3)
    assert scores["prompts_loose"] == scores["instructions_loose"] == 1
    assert scores["prompts_strict_error"] == pytest.approx(0.5)
    assert 0 < scores["instructions_strict_error"] < 0.5
    assert scores["instructions_loose_error"] == 0
