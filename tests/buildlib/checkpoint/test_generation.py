"""What `generation_config.json` says, and what a container makes of it."""

import json
from pathlib import Path

import pytest

from buildlib.builder.stages.package import proposed_sampler
from buildlib.checkpoint.config import load_config
from buildlib.checkpoint.generation import GenerationConfig, load_generation
from buildlib.checkpoint.tokenizer import write_configuration
from buildlib.container.genie_decoding import GREEDY
from buildlib.errors import ModelFileError
from tests.buildlib.checkpoint.test_tokenizer import CONFIG
from tests.buildlib.checkpoint.tokenizer_families import write

QWEN = {
    "bos_token_id": 8, "pad_token_id": 8, "do_sample": True, "eos_token_id": [9, 8],
    "repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
    "transformers_version": "4.37.0",
}  # fmt: skip


def test_all_its_ends_end_an_answer(tmp_path: Path) -> None:
    tokenizer = write("qwen-2", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(QWEN))
    write_configuration(json.dumps(CONFIG).encode(), tokenizer, tmp_path)
    assert load_config(tmp_path / "config.json").eos_token_ids == (9, 8)
    assert load_generation(tmp_path) == load_generation(tmp_path / "model")


def test_without_a_file_or_ends_those_of_the_configuration_count(tmp_path: Path) -> None:
    tokenizer = write("qwen-2", tmp_path / "model")
    for text in (None, "{}", '{"eos_token_id": null}'):
        if text is not None:
            (tmp_path / "model" / "generation_config.json").write_text(text)
        write_configuration(json.dumps(CONFIG).encode(), tokenizer, tmp_path)
        assert load_config(tmp_path / "config.json").eos_token_ids == (2,)
        assert proposed_sampler(load_generation(tmp_path), 192) == GREEDY


def test_the_proposed_sampler_is_genies() -> None:
    sampler = proposed_sampler(GenerationConfig.model_validate(QWEN), 192)
    assert json.loads(sampler.model_dump_json(by_alias=True, exclude_none=True)) == {
        "version": 1, "seed": 42, "temp": 0.7, "top-k": 20, "top-p": 0.8,
        "token-penalty": {"version": 1, "penalize-last-n": 192, "repetition-penalty": 1.1},
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{"do_sample": False}, {"do_sample": None}, {"temperature": 0}, {"top_k": 1}]
)
def test_what_does_not_sample_is_greedy(changes: dict[str, object]) -> None:
    config = GenerationConfig.model_validate(QWEN | changes)
    assert proposed_sampler(config, 192) == GREEDY


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": -0.1}, "/temperature"),
        ({"temperature": "hot"}, "/temperature"),
        ({"temperature": float("nan")}, "/temperature"),
        ({"top_k": 2.5}, "/top_k"),
        ({"top_k": -1}, "/top_k"),
        ({"top_p": 1.5}, "/top_p"),
        ({"top_p": 0}, "/top_p"),
        ({"repetition_penalty": 0}, "/repetition_penalty"),
        ({"do_sample": "yes"}, "/do_sample"),
        ({"eos_token_id": []}, "/eos_token_id"),
        ({"eos_token_id": [9, "8"]}, "/eos_token_id"),
        ({"eos_token_id": 400}, "no token 400, the eos_token_id of generation_config.json"),
    ],
)
def test_what_is_no_value_is_refused_in_one_line(
    changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    tokenizer = write("qwen-2", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(QWEN | changes))
    with pytest.raises(ModelFileError, match=said) as caught:
        write_configuration(json.dumps(CONFIG).encode(), tokenizer, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelFileError, match="generation_config"):
        load_generation(tmp_path)
