"""Tokenizer files of the kinds that families publish, with a few words of vocabulary.

`python tokenizer_families.py` prints what the transformers of that Python puts around a text by
each of them: `tests/fixtures/tokens_around.json` keeps the answer.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WORDS = ("a", "b", "ab")


def _template(*before: str, after: tuple[str, ...] = ()) -> dict[str, Any]:
    """A `TemplateProcessing`, as `tokenizer.json` has it; ids are filled in by `write`."""
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = [*map(_special, before), *text, *map(_special, after)]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}, *map(_special, after)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {}}


def _special(token: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": 0}}


_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
_LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
_FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
_GPT2 = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>"}
_QWEN = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>"}
_GEMMA = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>"}
_BERT = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]"}
_L3 = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
_TRIMMED = {
    "truncation": {
        "direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0,
    },
    "padding": {
        "strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "[PAD]",
    },
}  # fmt: skip

FAMILIES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-2": (
        {"post_processor": _template("<s>")},
        {**_LLAMA, "add_bos_token": True, "add_eos_token": False},
    ),
    "llama-3": (
        {"post_processor": {"type": "Sequence", "processors": [
            _BYTES, _template("<|begin_of_text|>")]}},
        {**_FAST, **_L3},
    ),
    "llama-without-flags": ({"post_processor": _template("<s>")}, _LLAMA),
    "llama-by-flag-alone": ({"post_processor": None}, {**_LLAMA, "add_bos_token": True}),
    "vicuna-with-eos": (
        {"post_processor": _template("<s>")},
        {**_LLAMA, "add_bos_token": True, "add_eos_token": True},
    ),
    "mistral": (
        {"post_processor": _template("<s>")},
        {**_LLAMA, "add_bos_token": True, "add_eos_token": False},
    ),
    "phi-3": (
        {"post_processor": _template("<s>")},
        {**_LLAMA, "add_bos_token": False, "add_eos_token": False, "eos_token": "<|end|>"},
    ),
    "phi-4": ({"post_processor": _BYTES}, {**_GPT2, "eos_token": "<|im_end|>"}),
    "qwen-2": ({"post_processor": _BYTES}, {**_QWEN, "add_bos_token": False}),
    "qwen-with-flag-and-no-bos": (
        {"post_processor": _BYTES}, {**_QWEN, "add_bos_token": True},
    ),
    "deepseek-distill": (
        {"post_processor": _template("<|begin_of_text|>")},
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False,
         "bos_token": {"content": "<|begin_of_text|>", "lstrip": False, "normalized": True,
                       "rstrip": False, "single_word": False, "__type": "AddedToken"},
         "eos_token": "<|end_of_text|>"},
    ),
    "gemma": (
        {"post_processor": _template("<bos>")},
        {**_GEMMA, "add_bos_token": True, "add_eos_token": False},
    ),
    "glm-4": (
        {"post_processor": _template("[gMASK]", "<sop>")}, {**_FAST, "eos_token": "<|endoftext|>"},
    ),
    "granite-with-bos": (
        {"post_processor": _BYTES},
        {**_GPT2, "eos_token": "<|endoftext|>", "add_bos_token": True},
    ),
    "olmo-2": (
        {"post_processor": _BYTES}, {**_GPT2, "tokenizer_class": "GPT2Tokenizer"},
    ),
    "flag-is-null": (
        {"post_processor": _template("<s>")}, {**_FAST, "bos_token": "<s>", "add_bos_token": None},
    ),
    "bert": (
        {"post_processor": _template("[CLS]", after=("[SEP]",))}, _BERT,
    ),
    "sentence-transformers": (
        {"post_processor": _template("[CLS]", after=("[SEP]",)), **_TRIMMED}, _BERT,
    ),
}  # fmt: skip
_SPECIAL = (
    "[PAD]", "<s>", "</s>", "<unk>", "<bos>", "<eos>", "<|begin_of_text|>", "<|end_of_text|>",
    "<|endoftext|>", "<|im_end|>", "<|end|>", "[gMASK]", "<sop>", "[CLS]", "[SEP]",
)  # fmt: skip


def write(name: str, folder: Path) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` of a kind; return the first."""
    changes, config = FAMILIES[name]
    ids = {token: number for number, token in enumerate((*_SPECIAL, *_WORDS))}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": ids[token], "content": token, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": True,
            }
            for token in _SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "decoder": None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": False,
            "ignore_merges": False, "vocab": ids, "merges": [["a", "b"]],
        },
        **changes,
    }  # fmt: skip
    text = json.dumps(tokenizer)
    tokenizer = json.loads(text)
    _fill(tokenizer["post_processor"], ids)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def _fill(processor: dict[str, Any] | None, ids: Mapping[str, int]) -> None:
    """Name the special tokens of a template with their ids."""
    for each in (processor or {}).get("processors", [processor]):
        pieces = (each or {}).get("single", ())
        names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
        if names:
            each["special_tokens"] = {
                name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in names
            }


def _ask_transformers() -> dict[str, list[list[int]]]:
    """Return the ids before and after a text, by the name of the kind."""
    from transformers import AutoTokenizer

    answers = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in FAMILIES:
            folder = Path(scratch) / name
            write(name, folder)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            plain = tokenizer("ab", add_special_tokens=False).input_ids
            whole = tokenizer("ab").input_ids
            start = next(n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
            answers[name] = [whole[:start], whole[start + len(plain) :]]
    return answers


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_ask_transformers(), indent=1) + "\n")
