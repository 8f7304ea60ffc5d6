"""Checks of instructions; the verdicts are those of IFEval's own program, run on these texts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.evaluation.instructions import Instruction

AT_LEAST, LESS = "at least", "less than"


@pytest.mark.parametrize(
    ("name", "arguments", "followed", "not_followed"),
    [
        ("keywords:existence", {"keywords": ["sea", "Ship"]}, "A ship at SEA.", "A ship."),
        (
            "keywords:frequency",
            {"keyword": "sea", "frequency": 2, "relation": AT_LEAST},
            "Seaside seas.",
            "The sea.",
        ),
        ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, "Seaside.", "The Sea!"),
        (
            "keywords:letter_frequency",
            {"letter": "e", "let_frequency": 2, "let_relation": LESS},
            "The sun.",
            "The sea.",
        ),
        (
            "length_constraints:number_sentences",
            {"num_sentences": 2, "relation": AT_LEAST},
            "Mr. Fox ran. He hid!",
            "Mr. Fox ran off",
        ),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***a***b***", "a******b"),
        (
            "length_constraints:number_words",
            {"num_words": 3, "relation": LESS},
            "two-words",
            "three-word text",
        ),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
            "First.\n\n'Then, it rained.",
            "First.\n\nIt rained then.",
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 1}, "To [name].", "To me"),
        (
            "detectable_content:postscript",
            {"postscript_marker": "P.P.S"},
            "Bye\np.p.s. more",
            "Bye\nP.S. more",
        ),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n** b"),
        ("detectable_format:constrained_response", {}, "So: My answer is no.", "No."),
        (
            "detectable_format:number_highlighted_sections",
            {"num_highlights": 2},
            "*a* and **b**",
            "*a* and ** **",
        ),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Part", "num_sections": 2},
            "Part 1\na\nPart 2\nb",
            "Part 1 a, part 2 b",
        ),
        ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}"),
        ("detectable_format:title", {}, "<<The Sea>>\nIt is wide.", "<< >>"),
        ("combination:two_responses", {}, "yes ****** no", "yes ****** yes"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi"}, "say hi: hi", "Hi"),
        ("startend:end_checker", {"end_phrase": "The end."}, 'Bye, "the END."', "The end. Bye"),
        ("startend:quotation", {}, ' "quoted" ', '"'),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": AT_LEAST},
            "NASA and ESA",
            "NASA and Esa",
        ),
        ("change_case:english_capital", {}, "ALL OF IT!", "All of it!"),
        ("change_case:english_lowercase", {}, "all of it!", "All of it!"),
        ("punctuation:no_comma", {}, "no comma", "one, comma"),
    ],
)
def test_an_answer_follows_an_instruction_or_not(
    name: str, arguments: dict[str, Any], followed: str, not_followed: str
) -> None:
    instruction = Instruction.of(name, arguments)
    assert instruction.is_followed(followed)
    assert not instruction.is_followed(not_followed)
    assert not instruction.is_followed(" \n")


@pytest.mark.parametrize(
    ("answer", "strict", "loose"),
    [
        ("Sure:\nall lower", False, True),
        ("all lower\nBye", False, True),
        ("Sure:\nall lower\nBye", False, True),
        ("all lower", True, True),
        ("All lower", False, False),
        ("Sure", False, False),
    ],
)
def test_loosely_the_first_and_last_lines_do_not_count(
    answer: str, strict: bool, loose: bool
) -> None:
    instruction = Instruction.of("change_case:english_lowercase", {"keywords": None})
    assert instruction.is_followed(answer) is strict
    assert instruction.is_followed(answer, loose=True) is loose
    end = Instruction.of("startend:end_checker", {"end_phrase": "The end."})
    assert not end.is_followed("**The end.**")
    assert end.is_followed("**The end.**", loose=True)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("keywords:nothing", {}),
        ("keywords:existence", {}),
        ("keywords:existence", {"keywords": "sea"}),
        ("keywords:existence", {"keywords": ["sea"], "more": 1}),
        ("length_constraints:number_words", {"num_words": -1, "relation": AT_LEAST}),
        ("length_constraints:number_words", {"num_words": 1, "relation": "around"}),
    ],
)
def test_unknown_instructions_and_arguments_are_refused(
    name: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=name.split(":", maxsplit=1)[0]) as caught:
        Instruction.of(name, arguments)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=60), st.sampled_from(["a", "(", "[x", "\\"]))
def test_any_text_has_a_verdict(answer: str, word: str) -> None:
    for name, arguments in (
        ("keywords:existence", {"keywords": [word]}),
        ("keywords:forbidden_words", {"forbidden_words": [word]}),
        ("detectable_content:postscript", {"postscript_marker": word}),
        ("detectable_format:multiple_sections", {"section_spliter": word, "num_sections": 1}),
        ("detectable_format:json_format", {}),
        ("detectable_format:number_bullet_lists", {"num_bullets": 1}),
    ):
        instruction = Instruction.of(name, arguments)
        assert instruction.is_followed(answer, loose=True) >= instruction.is_followed(answer)
