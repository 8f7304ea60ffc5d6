"""What stands around a text, and what of a tokenizer's file is switched off."""

import json
import subprocess
from pathlib import Path

import pytest

from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.tokenizer import (
    describe_trimming,
    load_text_config,
    load_tokenizer,
    read_tokenizer,
    spread_windows,
    text_bos,
    tokens_around,
    words_around,
    write_configuration,
)
from buildlib.errors import ModelWarning
from tests.buildlib.checkpoint import tokenizer_families
from tests.buildlib.checkpoint.tokenizer_families import FAMILIES, write
from tests.buildlib.configurations.test_configurations import REFERENCE, needs_transformers

ANSWERS = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "tokens_around.json").read_text("utf-8")
)
"""Of transformers 5.24."""
CONFIG = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 18, "bos_token_id": 8, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_around_a_text_is_what_transformers_puts_there(
    family: str, tmp_path: Path
) -> None:
    around = tokens_around(load_tokenizer(write(family, tmp_path)))
    assert [list(ids) for ids in around] == ANSWERS[family]


@needs_transformers
def test_transformers_answers_as_it_did(tmp_path: Path) -> None:
    command = [REFERENCE, str(tokenizer_families.__file__)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ANSWERS


@pytest.mark.parametrize(("family", "bos"), [("qwen-2", None), ("gemma", 4), ("mistral", 1)])
def test_a_stages_folder_says_what_stands_before_a_text(
    family: str, bos: int | None, tmp_path: Path
) -> None:
    tokenizer = write(family, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    assert load_config(tmp_path / "model" / "config.json").bos_token_id == 8
    assert load_text_config(tmp_path / "model").bos_token_id == bos
    write_configuration(json.dumps(CONFIG).encode(), tokenizer, tmp_path)
    config = load_config(tmp_path / "config.json")
    assert config.bos_token_id == bos
    assert config.begin == (() if bos is None else (bos,))
    assert (tmp_path / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def test_of_several_tokens_before_a_text_a_warning_tells(tmp_path: Path) -> None:
    with pytest.warns(ModelWarning, match=r"\[gMASK\]<sop> stand before a text"):
        assert text_bos(write("glm-4", tmp_path)) == 11


def test_truncation_and_padding_are_off_where_tokens_are_counted(tmp_path: Path) -> None:
    tokenizer = write("sentence-transformers", tmp_path / "model")
    words = "cuts texts to 128 tokens and fills them to 128"
    assert describe_trimming(read_tokenizer(tokenizer)) == words
    loaded = load_tokenizer(tokenizer)
    assert len(loaded.encode("ab" * 300).ids) == 302
    assert words_around(loaded) == ("[CLS]", "[SEP]")
    write_configuration(json.dumps(CONFIG).encode(), tokenizer, tmp_path)
    written = tmp_path / "tokenizer.json"
    assert describe_trimming(read_tokenizer(written)) == ""
    before, after = (json.loads(path.read_text()) for path in (tokenizer, written))
    assert after == before | {"truncation": None, "padding": None}


def test_calibration_begins_as_texts_do() -> None:
    tokens = list(range(100, 200))
    assert [window[:2] for window in spread_windows(tokens, 40, 2, 7)] == [[7, 100], [7, 160]]
    assert [window[0] for window in spread_windows(tokens, 40, 2, None)] == [100, 160]
