"""Instructions that a program can check an answer for, named as in IFEval.

Written from its paper (Zhou et al., 2023, arXiv 2311.07911, table 1) and the arguments in its data
(google-research/instruction_following_eval, Apache-2.0). An answer is checked strictly as it is,
and loosely: then it counts if it follows the instruction without its first or last line, or without
Markdown's asterisks. Sentences are counted by a rule of ours, where IFEval takes NLTK's model, and
upper and lower case says nothing of the language, which IFEval wants to be English.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, validate_call

from buildlib.validation import first_fault

_Relation = Literal["less than", "at least"]
_Count = Annotated[int, Field(ge=1)]
_Words = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_ABBREVIATION = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|e\.g|i\.e|[A-Z])\.$", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"""[.!?]+["')\]]*(?=\s|$)""")


@dataclass(frozen=True)
class Instruction:
    """One instruction with its arguments.

    Attributes:
        name: as IFEval names it.
        UNSUPPORTED: instructions of IFEval that need a model to tell languages apart.
    """

    name: str
    arguments: Mapping[str, Any]

    UNSUPPORTED: ClassVar[frozenset[str]] = frozenset({"language:response_language"})

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> Self:
        """Make an instruction; null arguments count as absent.

        Raises:
            ValueError: no such instruction, or wrong arguments.
        """
        if name not in _CHECKS:
            raise ValueError(f"no such instruction: {name!r}")
        values = {key: value for key, value in arguments.items() if value is not None}
        instruction = cls(name, values)
        instruction._holds("")  # which checks the arguments
        return instruction

    def is_followed(self, answer: str, *, loose: bool = False) -> bool:
        """Return whether an answer follows it; an empty one follows nothing."""
        variants = _variants(answer) if loose else (answer,)
        return any(text.strip() and self._holds(text) for text in variants)

    def _holds(self, text: str) -> bool:
        try:
            return _CHECKS[self.name](text, **self.arguments)
        except ValidationError as error:
            raise ValueError(f"{self.name}: {first_fault(error)}") from error


def _variants(answer: str) -> Iterator[str]:
    lines = answer.split("\n")
    selections = (lines, lines[1:], lines[:-1], lines[1:-1])
    for selection in selections:
        text = "\n".join(selection) if selection is lines else "\n".join(selection).strip()
        yield text
        yield text.replace("*", "")


def _compare(count: int, relation: _Relation, wanted: int) -> bool:
    return count < wanted if relation == "less than" else count >= wanted


def _has_keywords(text: str, keywords: _Words) -> bool:
    return all(word.casefold() in text.casefold() for word in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: _Count, relation: _Relation) -> bool:
    return _compare(text.casefold().count(keyword.casefold()), relation, frequency)


def _lacks_words(text: str, forbidden_words: _Words) -> bool:
    return not any(
        re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words
    )


def _letter_frequency(
    text: str, letter: str, let_frequency: _Count, let_relation: _Relation
) -> bool:
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def _number_of_sentences(text: str, num_sentences: _Count, relation: _Relation) -> bool:
    return _compare(_count_sentences(text), relation, num_sentences)


def _count_sentences(text: str) -> int:
    count, start = 0, 0
    for end in _SENTENCE_END.finditer(text):
        if _ABBREVIATION.search(text[start : end.end()]) is None:
            count, start = count + 1, end.end()
    return count + bool(text[start:].strip())


def _number_of_words(text: str, num_words: _Count, relation: _Relation) -> bool:
    return _compare(len(re.findall(r"\w+", text)), relation, num_words)


def _number_of_paragraphs(text: str, num_paragraphs: _Count) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    return len(_between_empty_ends(parts)) == num_paragraphs and all(_between_empty_ends(parts))


def _between_empty_ends(parts: list[str]) -> list[str]:
    first = 1 if parts and not parts[0] else 0
    last = len(parts) - 1 if len(parts) > first and not parts[-1] else len(parts)
    return parts[first:last]


def _first_word_of_paragraph(
    text: str, num_paragraphs: _Count, nth_paragraph: Annotated[int, Field(ge=1)], first_word: str
) -> bool:
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != num_paragraphs or nth_paragraph > count:
        return False
    words = parts[nth_paragraph - 1].split()
    if not words:
        return False
    word = re.split(r"""[.,?!'"]""", words[0].lstrip("'").lstrip('"'), maxsplit=1)[0]
    return word.lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: _Count) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    marker = re.sub(r"\s", "", postscript_marker.lower())
    patterns = {"p.p.s": r"p\.\s?p\.\s?s", "p.s.": r"p\.\s?s\."}
    pattern = patterns.get(marker, re.escape(postscript_marker.lower()))
    return re.search(pattern, text.lower()) is not None


def _bullets(text: str, num_bullets: _Count) -> bool:
    patterns = (r"^\s*\*[^*].*$", r"^\s*-.*$")
    return sum(len(re.findall(one, text, re.MULTILINE)) for one in patterns) == num_bullets


def _one_option(text: str) -> bool:
    return any(option in text for option in _OPTIONS)


def _highlights(text: str, num_highlights: _Count) -> bool:
    single = re.findall(r"\*[^\n*]*\*", text)
    double = re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(part.strip("* ")) for part in (*single, *double)) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: _Count) -> bool:
    parts = re.split(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)
    return len(parts) - 1 >= num_sections


def _is_json(text: str) -> bool:
    fenced = re.fullmatch(r"(?:```(?:json|Json|JSON)?)?(.*?)(?:```)?", text.strip(), re.DOTALL)
    try:
        json.loads(fenced[1].strip() if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    responses = _between_empty_ends(parts)
    return len(responses) == 2 and all(responses) and responses[0] != responses[1]


def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(text: str, capital_frequency: _Count, capital_relation: _Relation) -> bool:
    words = re.findall(r"[^\W_]+(?:[-'.][^\W_]+)*", text)
    return _compare(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def _upper(text: str) -> bool:
    return text.isupper()


def _lower(text: str) -> bool:
    return text.islower()


def _no_comma(text: str) -> bool:
    return "," not in text


_Check = Callable[..., bool]
_FUNCTIONS: Mapping[str, _Check] = MappingProxyType(
    {
        "keywords:existence": _has_keywords,
        "keywords:frequency": _keyword_frequency,
        "keywords:forbidden_words": _lacks_words,
        "keywords:letter_frequency": _letter_frequency,
        "length_constraints:number_sentences": _number_of_sentences,
        "length_constraints:number_paragraphs": _number_of_paragraphs,
        "length_constraints:number_words": _number_of_words,
        "length_constraints:nth_paragraph_first_word": _first_word_of_paragraph,
        "detectable_content:number_placeholders": _placeholders,
        "detectable_content:postscript": _postscript,
        "detectable_format:number_bullet_lists": _bullets,
        "detectable_format:constrained_response": _one_option,
        "detectable_format:number_highlighted_sections": _highlights,
        "detectable_format:multiple_sections": _sections,
        "detectable_format:json_format": _is_json,
        "detectable_format:title": _title,
        "combination:two_responses": _two_responses,
        "combination:repeat_prompt": _repeats_prompt,
        "startend:end_checker": _ends_with,
        "startend:quotation": _quoted,
        "change_case:capital_word_frequency": _capital_words,
        "change_case:english_capital": _upper,
        "change_case:english_lowercase": _lower,
        "punctuation:no_comma": _no_comma,
    }
)
_CHECKS: Mapping[str, _Check] = MappingProxyType(
    {
        name: validate_call(config=ConfigDict(strict=True))(check)
        for name, check in _FUNCTIONS.items()
    }
)
