"""Makes `suites/tasks/kjv_cloze.jsonl`: continuations of held-out text beside three others.

`python -m tools.tiny_llama.cloze` writes it again. The others are continuations of as many
words from other chapters of the held-out text, so no choice is a sentence that the model was
trained on, and all are of one kind.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import suites
from suites.models import tiny_llama

QUESTIONS = 60
_CONTEXT_WORDS, _CHOICE_WORDS, _CHOICES = 24, 4, 4
_SEED = 1611
_PLAIN = re.compile(r"[A-Za-z ]+")


def questions(text: str) -> Iterator[dict[str, object]]:
    """Yield rows of the task, one for each chosen place of the text."""
    draw = random.Random(_SEED)  # noqa: S311
    chapters = [line.split() for line in text.splitlines()]
    places = [
        (number, start)
        for number, words in enumerate(chapters)
        for start in range(_CONTEXT_WORDS, len(words) - _CHOICE_WORDS)
        if _PLAIN.fullmatch(" ".join(words[start : start + _CHOICE_WORDS]))
    ]

    def continuation(place: tuple[int, int]) -> str:
        number, start = place
        return " ".join(chapters[number][start : start + _CHOICE_WORDS])

    for place in sorted(draw.sample(places, QUESTIONS)):
        number, start = place
        elsewhere = [other for other in draw.sample(places, 40) if other[0] != number]
        others = list(dict.fromkeys(map(continuation, elsewhere)))[: _CHOICES - 1]
        answer = draw.randrange(_CHOICES)
        choices = [*others[:answer], continuation(place), *others[answer:]]
        context = " ".join(chapters[number][start - _CONTEXT_WORDS : start])
        yield {"context": context, "choices": choices, "answer": answer}


def main() -> None:
    """Write the file."""
    rows = questions(tiny_llama.heldout_text())
    path = Path(suites.__file__).parent / "tasks" / "kjv_cloze.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
