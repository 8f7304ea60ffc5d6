"""What counts as a right output, and where a wrong one first differs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import WrongUseError
from harness.results.records import OutputCheck
from harness.runtimes.tokenizer import encode, load_tokenizer
from harness.workloads.output_check import ReferenceText, ReferenceTokens, check_text, read_tokens
from suites.models import tiny_llama

TOKENIZER = tiny_llama.folder() / "tokenizer.json"
SENTENCE = "And the LORD said unto Moses, Go, and say unto the children of Israel"
PASSED = OutputCheck(outcome="passed", reason="the tokens of x")


def reference(text: str) -> ReferenceTokens:
    return ReferenceTokens.of(encode(load_tokenizer(TOKENIZER), text), TOKENIZER, "x")


def test_the_right_text_passes_and_may_go_on() -> None:
    expected = reference(SENTENCE)
    decoded = expected.prefixes[-1]
    assert expected.evaluate(decoded) == PASSED
    assert expected.evaluate(decoded + " and more").outcome == "passed"


@pytest.mark.parametrize("wrong", ["", "!", "And", "\N{REPLACEMENT CHARACTER}" * 9])
def test_garbage_and_what_stops_early_fails(wrong: str) -> None:
    found = reference(SENTENCE).evaluate(wrong)
    assert found.outcome == "failed"
    assert "it differs from x at token" in found.reason


@given(st.data())
def test_the_first_wrong_token_is_named(data: st.DataObject) -> None:
    expected = reference(SENTENCE)
    place = data.draw(st.integers(0, len(expected.prefixes) - 1))
    before = expected.prefixes[place - 1] if place else ""
    found = expected.evaluate(before + "\x01#")
    assert f"at token {place + 1}:" in found.reason


def test_tokens_of_another_model_are_wrong_use() -> None:
    for ids in ((10**6,), (-1,), ()):
        with pytest.raises(WrongUseError, match="tokens of this container"):
            ReferenceTokens.of(ids, TOKENIZER, "x")


def test_agreeing_with_a_session_is_worth_what_that_was_worth() -> None:
    assert ReferenceText("a", PASSED).evaluate("a").outcome == "passed"
    assert ReferenceText("a", OutputCheck()).evaluate("a").outcome == "none"
    found = ReferenceText("abcd", PASSED).evaluate("abXd")
    assert (found.outcome, "at character 3: 'Xd'" in found.reason) == ("failed", True)
    assert ReferenceText("ab", PASSED).evaluate("abc").outcome == "failed"
    right, wrong = ReferenceText("a", PASSED), ReferenceText("b", PASSED)
    assert check_text((right, wrong), "a").outcome == "failed"  # one failure outweighs all
    assert check_text((right, ReferenceText("a", OutputCheck())), "a").outcome == "passed"
    assert check_text((), "a").outcome == "none"


@pytest.mark.parametrize("content", ["1 2 3", "[1, 2, 3]", "1,2,3\n", "[\n 1,\n 2,\n 3\n]\n"])
def test_files_of_tokens(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(content)
    assert read_tokens(path) == (1, 2, 3)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"one", b"1.5", b"-1", b"1 \xff", b"9" * 30, b'{"a": 1}']
)
def test_files_of_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(WrongUseError):
        read_tokens(path)
    with pytest.raises(WrongUseError):
        read_tokens(tmp_path)
