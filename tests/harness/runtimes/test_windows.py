from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from harness.errors import WrongUseError
from harness.runtimes.tokenizer import ContextLimit, cut_windows
from suites.models import tiny_llama

TOKENIZER = tiny_llama.folder() / "tokenizer.json"


def test_windows_score_a_text_once_and_in_order() -> None:
    text = tiny_llama.heldout_text()[:20_000]
    windows = cut_windows(text, TOKENIZER, ContextLimit(192, 32))
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(text, add_special_tokens=False).ids
    assert all(len(window.scored) == 160 for window in windows)
    scored = [token for window in windows for token in window.scored]
    # Cutting may retokenize the word at a window's edge, and nothing else.
    same = sum(a == b for a, b in zip(scored, ids, strict=False))
    assert same > 0.95 * len(scored)
    assert len(ids) - len(scored) < 160 + 192
    assert cut_windows(text, TOKENIZER, ContextLimit(192, 32), 3) == windows[:3]


@settings(max_examples=10)
@given(st.text(min_size=300, max_size=1500))
def test_every_window_holds_what_genie_insists_on(text: str) -> None:
    encoder = Tokenizer.from_file(str(TOKENIZER))
    try:
        windows = cut_windows(text, TOKENIZER, ContextLimit(64, 16))
    except WrongUseError:
        return
    for window in windows:
        ids = encoder.encode(window.text, add_special_tokens=False).ids
        assert 63 <= len(ids) <= 126
        assert tuple(ids[:48]) == window.scored
        assert "\0" not in window.text


def test_a_short_text_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(WrongUseError, match="longer text") as caught:
        cut_windows("too short", TOKENIZER, ContextLimit(192, 32))
    assert caught.value.exit_code == 2
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(WrongUseError, match=r"tokenizer\.json"):
        cut_windows("text", broken, ContextLimit(192, 32))
