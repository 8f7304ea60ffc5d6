"""Tokenizer, chat template and end tokens of a GGUF, as the files that transformers reads.

Sources: the keys, and what holds where one is missing, are as llama.cpp reads them
(https://github.com/ggml-org/llama.cpp, MIT, `src/llama-vocab.cpp`). A pattern by which a text is
cut before it is merged is that of the `tokenizer.json` of the model that it is named after, as is
NFC before it, which llama.cpp leaves out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plugins.gguf.config import Metadata

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _by_case(digits: str, end: str = "") -> str:
    words = f"{_BEFORE}{_UPPER}*{_LOWER}+{end}|{_BEFORE}{_UPPER}+{_LOWER}*{end}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


@dataclass(frozen=True)
class _Cut:
    """Cuts of a text, before its pieces are merged.

    Attributes:
        patterns: each cuts the pieces of the one before it.
        composed: whether the text is brought into NFC first.
        whole: whether a piece that is a token is taken as it is, whatever merges say.
    """

    patterns: tuple[str, ...]
    composed: bool = False
    whole: bool = False


_DIGITS_FIRST = _Cut((r"\p{N}", _GPT2))
_CUTS: Mapping[str, _Cut] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "exaone4", "a.x-4.0", "mellum"), _Cut((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), _DIGITS_FIRST),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _Cut((_LLAMA3,), whole=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _Cut((_LLAMA3,))),
    "qwen2": _Cut((_QWEN2,), composed=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "stablelm2"), _Cut((_QWEN2,))),
    "seed-coder": _Cut(
        (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "gpt-4o": _Cut((_by_case(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "tekken": _Cut((_by_case(r"\p{N}"),), whole=True),
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>",
    "<EOT>", "<|end_of_text|>", "<eos>", "<|user|>",
))  # fmt: skip
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_KEYS = "tokenizer.ggml."

Json = dict[str, Any]


class GgufTokenizer:
    """The tokenizer of a GGUF.

    Raises:
        ModelFileError: it is of a kind that is not known, or its tables contradict each other.
    """

    def __init__(self, model: Metadata) -> None:
        self._model, self._keys = model, model.header.keys
        self.kind = str(self._keys.get(f"{_KEYS}model", ""))
        self.pre = str(self._keys.get(f"{_KEYS}pre", ""))
        if self.kind not in {"gpt2", "llama"}:
            what = f"of the kind {self.kind[:40]!r}" if self.kind else "missing"
            raise model.refuse(f"its tokenizer is {what}; known are gpt2 (BPE) and llama (SPM)")
        if self.kind == "gpt2" and self.pre not in _CUTS:
            known = ", ".join(_CUTS)
            raise model.refuse(
                f"its tokenizer cuts texts as {self.pre[:40]!r} does (tokenizer.ggml.pre); known "
                f"are {known}"
            )
        self._cut = _CUTS.get(self.pre, _Cut(()))
        self._tokens: list[str] = model.header.array(f"{_KEYS}tokens")
        self._types: list[int] = model.header.array(f"{_KEYS}token_type")
        self._types = self._types or [_NORMAL] * len(self._tokens)
        if len(self._types) != len(self._tokens) or not self._tokens:
            counts = f"{len(self._tokens)} tokens and {len(self._types)} types of them"
            raise model.refuse(f"its tokenizer has {counts}")
        if len(set(self._tokens)) != len(self._tokens):
            raise model.refuse("its tokenizer has one token twice")
        self._unknown = self._find_unknown()

    @property
    def special_ids(self) -> Json:
        """`bos_token_id`, `eos_token_id` and `pad_token_id`; several ends of a text are a list."""
        ends = [self._id("eos"), self._id("eot"), self._id("eom")]
        if self._keys.get("tokenizer.chat_template"):
            ends += [
                number
                for number, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
                if token in _ENDS and kind == _CONTROL
            ]
        found = list(dict.fromkeys(end for end in ends if end is not None))
        ids = {
            "bos_token_id": self._id("bos"),
            "eos_token_id": found if len(found) > 1 else next(iter(found), None),
            "pad_token_id": self._id("padding"),
        }
        return {key: value for key, value in ids.items() if value is not None}

    def generation_config(self) -> Json:
        """Return `generation_config.json`: ends of a text, and samplers that the file proposes."""
        values = {
            theirs: self._keys.get(f"general.sampling.{ours}") for ours, theirs in _SAMPLING.items()
        }
        given = {
            key: round(value, 6)
            for key, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        return {**self.special_ids, **given, **({"do_sample": True} if given else {})}

    def tokenizer_config(self) -> Json:
        """Return `tokenizer_config.json`."""
        ids = {
            f"{name}_token": self._id(key)
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
        }
        template = self._keys.get("tokenizer.chat_template")
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self._model.header.adds_bos,
            "add_eos_token": self._adds_eos,
            "clean_up_tokenization_spaces": False,
            **{name: self._tokens[number] for name, number in ids.items() if number is not None},
            **({"chat_template": template} if isinstance(template, str) else {}),
        }

    def tokenizer(self) -> Json:
        """Return `tokenizer.json`."""
        parts = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added()),
            "post_processor": self._post_processor(),
            **parts,
        }

    def _byte_level(self) -> Json:
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        splits = [
            {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
            for one in self._cut.patterns
        ]
        merges = [
            [first, second]
            for text in self._model.header.array(f"{_KEYS}merges")
            for first, _, second in (text.partition(" "),)
        ]
        model = {"merges": merges, "ignore_merges": self._cut.whole, "byte_fallback": False}
        return {
            "normalizer": {"type": "NFC"} if self._cut.composed else None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [*splits, {**level, "use_regex": False}],
            },
            "decoder": {**level, "use_regex": True},
            "model": self._bpe(**model),
        }

    def _sentencepiece(self) -> Json:
        """Return the parts of a SentencePiece BPE: of two neighbours, the best pair goes first."""
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
        prefixed = self._keys.get(f"{_KEYS}add_space_prefix", True)
        if prefixed:
            steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        prefix = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
        model = {
            "merges": self._merges_by_score(),
            "ignore_merges": False,
            "byte_fallback": _BYTE in self._types,
            "fuse_unk": True,
            "unk_token": self._unknown,
        }
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": steps},
            "model": self._bpe(**model),
        }

    def _bpe(self, **model: object) -> Json:
        """Return a model over all tokens that a text can have."""
        vocabulary = {
            token: number
            for number, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind != _UNUSED
        }
        usual = {"dropout": None, "unk_token": None, "fuse_unk": False}
        affixes = {"continuing_subword_prefix": None, "end_of_word_suffix": None}
        return {"type": "BPE", **usual, **affixes, **model, "vocab": vocabulary}

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Return every pair of tokens that makes a token, by the score of what it makes.

        Of pairs that make the same one SentencePiece takes the first in the text. Ranks cannot say
        that: the longest left part goes first, which comes nearest to it, as transformers has it.
        """
        scores = self._model.header.array(f"{_KEYS}scores")
        if len(scores) != len(self._tokens):
            raise self._model.refuse(f"its tokenizer has {len(scores)} scores of its tokens")
        normal = {
            token: number
            for number, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind == _NORMAL
        }
        pairs = [
            (-scores[number], -cut, normal[token[:cut]], normal[token[cut:]])
            for token, number in normal.items()
            for cut in range(1, len(token))
            if token[:cut] in normal and token[cut:] in normal
        ]
        return [(self._tokens[first], self._tokens[second]) for *_, first, second in sorted(pairs)]

    def _added(self) -> Iterator[Json]:
        """Yield tokens that are found in a text before it is cut."""
        # Nothing in the file tells it: transformers' Phi 3, and llama.cpp by that name.
        name = self._model.header.name.lower()
        strips = any(word in name for word in ("phi-3", "phi3"))
        for number, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if token and (kind in {_CONTROL, _USER_DEFINED} or token == self._unknown):
                yield {
                    "id": number,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": strips and token not in {"<unk>", "<s>", "<|endoftext|>"},
                    "normalized": False,
                    "special": kind != _USER_DEFINED,
                }

    def _post_processor(self) -> Json | None:
        bos, eos = self._id("bos"), self._id("eos")
        before = [bos] if self._model.header.adds_bos and bos is not None else []
        after = [eos] if self._adds_eos and eos is not None else []
        if not before and not after:
            return None

        def template(kind: str, number: int) -> list[Json]:
            def special(token: int) -> Json:
                return {"SpecialToken": {"id": self._tokens[token], "type_id": number}}

            text = {"Sequence": {"id": kind, "type_id": number}}
            return [*map(special, before), text, *map(special, after)]

        return {
            "type": "TemplateProcessing",
            "single": template("A", 0),
            "pair": [*template("A", 0), *template("B", 1)],
            "special_tokens": {
                self._tokens[one]: {
                    "id": self._tokens[one],
                    "ids": [one],
                    "tokens": [self._tokens[one]],
                }
                for one in (*before, *after)
            },
        }

    @property
    def _adds_eos(self) -> bool:
        return bool(self._keys.get(f"{_KEYS}add_eos_token", False))

    def _find_unknown(self) -> str | None:
        """Return the token of what no token stands for."""
        number = self._id("unknown")
        if number is not None:
            return self._tokens[number]
        kinds = zip(self._tokens, self._types, strict=True)
        return next((token for token, kind in kinds if kind == _UNKNOWN), None)

    def _id(self, name: str) -> int | None:
        """Return the id of a special token; None if it has none that a token has."""
        # llama.cpp's names of the ids of SentencePiece where no key names others
        usual = {"bos": 1, "eos": 2, "unknown": 0} if self.kind == "llama" else {}
        value = self._keys.get(f"{_KEYS}{name}_token_id", usual.get(name))
        if isinstance(value, bool) or not isinstance(value, int):
            return None
        return value if 0 <= value < len(self._tokens) else None
