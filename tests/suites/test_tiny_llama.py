"""The reference model is what its folder says, and it has learned."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from suites.models import tiny_llama
from tools.tiny_llama import evaluate, numpy_model, tokens
from tools.tiny_llama.architecture import Architecture

AR_LENGTHS = (1, 16, 32, 64, 128)
CONTEXTS = (128, 192, 256, 512)


@pytest.fixture(scope="module")
def architecture() -> Architecture:
    return Architecture.load(tiny_llama.folder())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokens.load_tokenizer(tiny_llama.folder())


def test_it_is_a_small_llama_of_hugging_face(architecture: Architecture) -> None:
    config = json.loads((tiny_llama.folder() / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["model_type"], config["hidden_act"]) == ("llama", "silu")
    assert (config["tie_word_embeddings"], config["torch_dtype"]) == (True, "float16")
    assert 1_000_000 <= architecture.parameter_count() <= 2_000_000
    assert architecture.vocab_size >= 1200
    assert architecture.num_attention_heads % architecture.num_key_value_heads == 0
    assert 1 < architecture.num_key_value_heads < architecture.num_attention_heads
    assert architecture.head_dim % 2 == 0
    assert architecture.max_position_embeddings >= max(CONTEXTS)
    assert (tiny_llama.folder() / "model.safetensors").stat().st_size <= 5_000_000


def test_no_size_can_be_mistaken_for_a_length(architecture: Architecture) -> None:
    # Genie tells AR and context length by the shapes of the tensors
    pasts = {cl - ar for cl in CONTEXTS for ar in AR_LENGTHS if cl > ar}
    lengths = {*AR_LENGTHS, *CONTEXTS, *pasts}
    sizes = {
        architecture.hidden_size,
        architecture.intermediate_size,
        architecture.head_dim,
        architecture.head_dim // 2,
        architecture.num_attention_heads,
        architecture.num_key_value_heads,
        architecture.num_key_value_heads * architecture.head_dim,
        architecture.vocab_size,
    }
    assert not sizes & lengths


def test_tensors_are_those_of_the_config(architecture: Architecture) -> None:
    tensors = load_file(tiny_llama.folder() / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == architecture.tensor_shapes()
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float16)}
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())


def test_begin_and_end_are_real_tokens(architecture: Architecture, tokenizer: Tokenizer) -> None:
    settings, generation = (
        json.loads((tiny_llama.folder() / f"{name}_config.json").read_text(encoding="utf-8"))
        for name in ("tokenizer", "generation")
    )
    assert tokenizer.get_vocab_size() == architecture.vocab_size
    for name in ("bos_token", "eos_token"):
        token = getattr(architecture, f"{name}_id")
        assert tokenizer.token_to_id(settings[name]) == generation[f"{name}_id"] == token
    assert tokenizer.encode("").ids == [architecture.bos_token_id]
    assert tokenizer.decode(tokenizer.encode(" In the beginning\n").ids) == " In the beginning\n"


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = tokens.load_tokenizer(tiny_llama.folder())
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_it_has_learned() -> None:
    found = evaluate.evaluate(
        tiny_llama.folder(), tiny_llama.heldout_text(), window=192, max_windows=4
    )
    assert found.n_windows == 4
    assert found.model < found.unigram / 10
    assert found.model_second_half < found.unigram_second_half / 10


def test_a_token_sees_no_later_one(architecture: Architecture) -> None:
    weights = numpy_model.load_weights(tiny_llama.folder())
    ids = np.arange(100, 140)
    changed = np.where(np.arange(40) < 20, ids, 7)
    before, after = (numpy_model.logits(architecture, weights, text) for text in (ids, changed))
    np.testing.assert_allclose(before[:20], after[:20], rtol=1e-4, atol=1e-4)
    assert not np.allclose(before[20:], after[20:], atol=0.1)


def test_unigram_knows_the_share_of_each_token() -> None:
    counted = np.array([[0, 5, 5, 9], [9, 5, 5, 0]])
    found = evaluate.unigram_surprises(counted, np.array([[0, 5, 9, 0]]))
    np.testing.assert_allclose(np.exp(found), [[2, 4, 4]])  # one over the share


def test_stream_wraps_each_document(architecture: Architecture, tokenizer: Tokenizer) -> None:
    ids = tokens.stream(tokenizer, architecture, "In the beginning\n\nAnd God said\n").tolist()
    begins = [place for place, token in enumerate(ids) if token == architecture.bos_token_id]
    ends = [place for place, token in enumerate(ids) if token == architecture.eos_token_id]
    assert begins == [0, ends[0] + 1]
    assert ends[1] == len(ids) - 1
    assert tokenizer.decode(ids) == "In the beginning\nAnd God said\n"
