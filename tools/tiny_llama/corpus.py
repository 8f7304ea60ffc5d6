"""Makes the text files: the King James Bible of Debian's `bible-kjv`, without verse numbers.

`python -m tools.tiny_llama.corpus` writes `text/*.txt` again. They are in the repository,
so only a change of the selection needs it. A chapter is a line; in the training text an empty line
ends a book.
"""

import itertools
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from suites.models import tiny_llama

HELDOUT_EVERY = 30
"""Each 30th chapter is held out: 39 of 1,189."""

CALIBRATION_EVERY = 60
"""Of the training chapters, one in 60 is repeated as calibration text."""

_VERSE = re.compile(r"(?P<book>[0-9]?[A-Za-z]+)(?P<chapter>[0-9]+):[0-9]+ (?P<text>.+)")


@dataclass(frozen=True)
class Chapter:
    """One chapter as flowing text; `number` counts from 1 within the book."""

    book: str
    number: int
    text: str


def dump() -> str:
    """Return the output of Debian's `bible`, a verse a line: `Ge1:1 In the beginning ...`."""
    done = subprocess.run(  # the command of the Debian package, found on the PATH by design
        ["bible", "-f", "gen1:1-rev22:22"],  # noqa: S607
        check=True,
        capture_output=True,
        encoding="ascii",
        timeout=60,
    )
    return done.stdout


def chapters(verses: str) -> list[Chapter]:
    """Join the verses of each chapter.

    Raises:
        ValueError: a line is no verse.
    """
    return [
        Chapter(book, number, " ".join(text for _, _, text in group))
        for (book, number), group in itertools.groupby(
            map(_parse, verses.splitlines()), key=lambda verse: verse[:2]
        )
    ]


def _parse(line: str) -> tuple[str, int, str]:
    found = _VERSE.fullmatch(line.strip())
    if found is None:
        raise ValueError(f"not a verse: {line!r}")
    return found["book"], int(found["chapter"]), " ".join(found["text"].split())


def split(all_chapters: Sequence[Chapter]) -> tuple[list[Chapter], list[Chapter]]:
    """Return training and held-out chapters."""
    heldout = list(all_chapters[HELDOUT_EVERY - 1 :: HELDOUT_EVERY])
    chosen = set(heldout)
    return [chapter for chapter in all_chapters if chapter not in chosen], heldout


def write(verses: str, out: Path) -> None:
    """Write `train.txt`, `heldout.txt` and `calibration.txt` into the folder `out`."""
    training, heldout = split(chapters(verses))
    books = [
        _lines(group) for _, group in itertools.groupby(training, key=lambda chapter: chapter.book)
    ]
    (out / "train.txt").write_text("\n".join(books), encoding="utf-8")
    (out / "heldout.txt").write_text(_lines(heldout), encoding="utf-8")
    (out / "calibration.txt").write_text(
        _lines(training[CALIBRATION_EVERY // 2 :: CALIBRATION_EVERY]), encoding="utf-8"
    )


def _lines(some: Iterable[Chapter]) -> str:
    return "".join(f"{chapter.text}\n" for chapter in some)


if __name__ == "__main__":
    write(dump(), tiny_llama.folder() / "text")
