"""Task files: JSON lines of questions with choices, or of prompts with instructions to follow.

- `question`, `choices`, `answer`, `subject`, as MMLU has them: the prompt letters the choices, and
  the letters are scored.
- `context`, `choices`, `answer`, as in HellaSwag: the choices are scored as continuations.
- `prompt`, `instruction_id_list`, `kwargs`, as IFEval has them: an answer is generated and checked.

`answer` is a number from 0 or a letter. Prompts are those of lm-evaluation-harness (`mmlu`,
`_encode_pair`).
"""

import hashlib
import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from buildlib.validation import first_fault
from harness.errors import HostFileError
from plugins.evaluation.instructions import Instruction

_MAX_BYTES = 256 << 20
_LETTERS = string.ascii_uppercase
_Text = Annotated[str, Field(max_length=1 << 20)]
_Choice = Annotated[str, Field(min_length=1, max_length=1 << 16)]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, regex_engine="python-re")


class Choices(_Row):
    """A question with choices; of `question` and `context` it has one.

    Attributes:
        answer: place of the right choice, from 0.
    """

    question: _Text | None = None
    context: _Text | None = None
    subject: _Text | None = None
    choices: Annotated[
        tuple[_Choice, ...], Field(min_length=2, max_length=len(_LETTERS), strict=False)
    ]
    answer: int

    @model_validator(mode="before")
    @classmethod
    def _number_of_letter(cls, row: Any) -> Any:  # noqa: ANN401
        answer = row.get("answer") if isinstance(row, dict) else None
        if isinstance(answer, str) and len(answer) == 1 and answer in _LETTERS:
            return {**row, "answer": _LETTERS.index(answer)}
        return row

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.question is None) == (self.context is None):
            raise ValueError("give one of question and context")
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer {self.answer} is none of {len(self.choices)} choices")
        return self

    @property
    def prompt(self) -> str:
        """The text before a choice."""
        if self.question is None:
            return self.context or ""
        lettered = zip(_LETTERS, self.choices, strict=False)
        lines = [self.question.strip(), *(f"{letter}. {text}" for letter, text in lettered)]
        return "\n".join([*lines, "Answer:"])

    @property
    def answers(self) -> tuple[str, ...]:
        """The texts that are scored: letters, or the choices."""
        return self.choices if self.question is None else tuple(_LETTERS[: len(self.choices)])

    def after(self, examples: Sequence["Choices"]) -> str:
        """Return the prompt after solved examples of the same subject."""
        alike = [one for one in examples if one.subject == self.subject]
        solved = [f"{one.prompt} {one.answers[one.answer]}\n\n" for one in alike]
        about = ""
        if self.subject is not None:
            subject = self.subject.replace("_", " ")
            about = f"The following are multiple choice questions (with answers) about {subject}."
            about += "\n\n"
        return "".join([about, *solved, self.prompt])


class Instructed(_Row):
    """A prompt, and instructions that its answer is checked for.

    Attributes:
        unsupported: instructions that cannot be checked here.
    """

    prompt: Annotated[_Text, Field(min_length=1, pattern=r"\A[^\x00]+\Z")]
    instruction_id_list: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    kwargs: Annotated[tuple[dict[str, Any], ...], Field(strict=False)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.kwargs) != len(self.instruction_id_list):
            raise ValueError(
                f"kwargs has {len(self.kwargs)} entries for {len(self.instruction_id_list)} "
                "instructions"
            )
        _ = self.instructions
        return self

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The instructions that can be checked."""
        pairs = zip(self.instruction_id_list, self.kwargs, strict=True)
        return tuple(
            Instruction.of(name, arguments)
            for name, arguments in pairs
            if name not in Instruction.UNSUPPORTED
        )

    @property
    def unsupported(self) -> tuple[str, ...]:
        """Instructions of the benchmark that cannot be checked here."""
        return tuple(name for name in self.instruction_id_list if name in Instruction.UNSUPPORTED)


Row = Choices | Instructed


@dataclass(frozen=True)
class Task:
    """The rows of one file, all of one kind.

    Attributes:
        left_out: prompts with an instruction that cannot be checked.
    """

    name: str
    sha256: str
    rows: Sequence[Choices] | Sequence[Instructed]
    left_out: int = 0

    @property
    def kind(self) -> str:
        """A row in words."""
        return "question" if isinstance(self.rows[0], Choices) else "prompt"


def read_task(path: Path, limit: int | None = None) -> Task:
    """Read a task file.

    Raises:
        HostFileError: it cannot be read, or a line of it is no row.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise HostFileError(str(path), f"larger than {_MAX_BYTES:,} bytes")
        content = path.read_bytes()
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise HostFileError(str(path), error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise HostFileError(str(path), f"no text in UTF-8: {error.reason}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and (limit is None or len(rows) < limit):
            rows.append(_read_row(line, path, number))
    sha256 = hashlib.sha256(content).hexdigest()
    choices = [row for row in rows if isinstance(row, Choices)]
    prompts = [row for row in rows if isinstance(row, Instructed)]
    if not rows:
        raise HostFileError(str(path), "it holds no rows")
    if choices and prompts:
        raise HostFileError(str(path), "it holds questions and prompts: give each a file")
    if choices:
        return Task(path.stem, sha256, choices)
    supported = [row for row in prompts if not row.unsupported]
    if not supported:
        reason = f"no row can be checked: {', '.join(sorted(Instruction.UNSUPPORTED))}"
        raise HostFileError(str(path), reason)
    return Task(path.stem, sha256, supported, len(prompts) - len(supported))


def task_files(paths: Sequence[Path]) -> list[Path]:
    """Return files, and those of folders that end in `.jsonl`, in the order of their names."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise HostFileError(str(path), "it holds no .jsonl files")
        files += inside
    return files


def _read_row(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise HostFileError(str(path), f"line {number} is not valid JSON: {error}") from error
    kind = Instructed if isinstance(row, dict) and "instruction_id_list" in row else Choices
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        raise HostFileError(str(path), f"line {number}: {first_fault(error, kind)}") from error
