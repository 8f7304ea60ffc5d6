"""Task files: what is read, how it is asked, and what is refused in one line."""

import json
from pathlib import Path

import pytest

from harness.errors import HostFileError
from plugins.evaluation.tasks import Choices, Instructed, read_task, task_files

QUESTION = {"question": " 1 + 1? ", "choices": ["1", "2"], "answer": "B", "subject": "easy_sums"}
CLOZE = {"context": "One and", "choices": ["two", "three"], "answer": 0}
PROMPT = {"prompt": "Go", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def write(folder: Path, *rows: object) -> Path:
    path = folder / "task.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
    return path


def test_a_question_is_asked_as_mmlu_is(tmp_path: Path) -> None:
    task = read_task(write(tmp_path, QUESTION))
    (row,) = task.rows
    assert isinstance(row, Choices)
    example = row.model_copy(update={"question": "2 + 2?", "choices": ("4", "5"), "answer": 0})
    other = example.model_copy(update={"subject": "else"})
    assert row.after([example, other]) == (
        "The following are multiple choice questions (with answers) about easy sums.\n\n"
        "2 + 2?\nA. 4\nB. 5\nAnswer: A\n\n"
        "1 + 1?\nA. 1\nB. 2\nAnswer:"
    )
    assert (row.answers, row.answer) == (("A", "B"), 1)
    assert (task.name, len(task.sha256), task.kind) == ("task", 64, "question")


def test_a_context_is_followed_by_its_choices(tmp_path: Path) -> None:
    (row,) = read_task(write(tmp_path, CLOZE)).rows
    assert isinstance(row, Choices)
    assert (row.after([row]), row.answers) == ("One and two\n\nOne and", ("two", "three"))
    assert len(read_task(write(tmp_path, CLOZE, CLOZE, "no row"), 2).rows) == 2


def test_prompts_whose_language_would_have_to_be_known_are_left_out(tmp_path: Path) -> None:
    language = {
        "prompt": "Los",
        "instruction_id_list": ["punctuation:no_comma", "language:response_language"],
        "kwargs": [{}, {"language": "de"}],
    }
    task = read_task(write(tmp_path, PROMPT, language))
    assert (len(task.rows), task.left_out, task.kind) == (1, 1, "prompt")
    assert isinstance(task.rows[0], Instructed)
    assert [each.name for each in task.rows[0].instructions] == ["punctuation:no_comma"]
    with pytest.raises(HostFileError, match="no row can be checked"):
        read_task(write(tmp_path, language))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no rows"),
        ([CLOZE, PROMPT], "questions and prompts"),
        ([CLOZE, [1]], "line 3"),
        ([{**CLOZE, "answer": 2}], "answer 2"),
        ([{**CLOZE, "answer": "Z"}], "answer"),
        ([{**CLOZE, "choices": ["one"]}], "choices"),
        ([{**CLOZE, "question": "both"}], "one of question and context"),
        ([{**PROMPT, "kwargs": []}], "kwargs"),
        ([{**PROMPT, "prompt": "a\0b"}], "prompt"),
        ([{**PROMPT, "instruction_id_list": ["no:such"]}], "no:such"),
    ],
)
def test_other_rows_are_refused_in_one_line(rows: list[object], said: str, tmp_path: Path) -> None:
    with pytest.raises(HostFileError) as caught:
        read_task(write(tmp_path, *rows))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_are_their_jsonl_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in task_files([tmp_path, tmp_path / "c.txt"])] == [
        "a.jsonl", "b.jsonl", "c.txt",
    ]  # fmt: skip
    (tmp_path / "empty").mkdir()
    with pytest.raises(HostFileError, match="it holds no"):
        task_files([tmp_path / "empty"])
