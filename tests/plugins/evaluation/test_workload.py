"""The `evaluate` workload on the reference model: its scores on the device, in float and alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.devices.device import Device
from harness.errors import OutputCheckError, WrongUseError
from harness.results.store import ResultsStore
from harness.runtimes.container_model import open_container
from harness.runtimes.genie.runtime import GenieModel
from harness.runtimes.tokenizer import load_tokenizer
from harness.workloads.base import Recording
from harness.workloads.session import Session
from plugins.evaluation.choices import encode_question
from plugins.evaluation.tasks import Choices, read_task
from plugins.evaluation.workload import ITEMS, Evaluate
from suites.models import tiny_llama
from tools.tiny_llama.architecture import Architecture
from tools.tiny_llama.numpy_model import load_weights, logits

CLOZE = Path(__file__).parents[3] / "suites" / "tasks" / "kjv_cloze.jsonl"
ROWS = 2


@pytest.fixture(scope="module")
def session(virtual_device: Device, tiny_bundle: Path) -> Iterator[Session]:
    with Session(virtual_device, GenieModel(open_container(tiny_bundle))) as opened:
        yield opened


def numpy_scores(rows: int) -> list[tuple[float, ...]]:
    folder = tiny_llama.folder()
    architecture, weights = Architecture.load(folder), load_weights(folder)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    found = []
    for row in read_task(CLOZE, rows).rows:
        assert isinstance(row, Choices)
        question = encode_question(tokenizer, row.prompt, row.answers, row.answer)
        values = []
        for choice in question.choices:
            ids = np.array([architecture.bos_token_id, *question.prompt, *choice])
            scores = logits(architecture, weights, ids[:-1]).astype(np.float64)
            scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
            start = len(question.prompt)
            values.append(float(scores[np.arange(len(choice)) + start, list(choice)].sum()))
        found.append(tuple(values))
    return found


@pytest.mark.variant
def test_choices_on_the_device_and_in_float(session: Session, store: ResultsStore) -> None:
    workload = Evaluate.of(task=str(CLOZE), limit=ROWS, reference=str(tiny_llama.folder()))
    workload.check(session.model)
    result = workload.run(session, Recording(lambda: store))
    expected = numpy_scores(ROWS)
    for item, values in zip(result.output.items, expected, strict=True):
        assert item["float"] == pytest.approx(values, abs=1e-2)
        assert item["log_likelihoods"] == pytest.approx(values, rel=0.05, abs=0.5)
    run = result.run
    assert run is not None
    assert (run.kind, run.status, run.workload.prompt) == ("evaluate", "done", "kjv_cloze")
    assert run.workload.sampler["rows"] == ROWS
    kept = next(one for one in store.artifacts(run.id) if one.name == ITEMS)
    lines = store.read_artifact(kept).decode().splitlines()
    assert [json.loads(line) for line in lines] == list(result.output.items)
    assert run.values("accuracy") == (result.values["accuracy"],)


def test_prompts_are_answered_and_checked(session: Session, tmp_path: Path) -> None:
    rows = [
        {"prompt": "In the beginning God created", "instruction_id_list": [name], "kwargs": [given]}
        for name, given in (
            ("punctuation:no_comma", {}),
            ("length_constraints:number_words", {"num_words": 2, "relation": "at least"}),
        )
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    output = Evaluate.of(task=str(path), max_tokens=3).run(session).output
    answers = [str(item["answer"]) for item in output.items]
    assert answers[0] == answers[1] != ""
    assert output.values["prompts_strict"] == np.mean(
        ["," not in answers[0], len(answers[1].split()) > 1]
    )
    with pytest.raises(WrongUseError, match="questions with choices"):
        Evaluate.of(task=str(path), few_shot=str(CLOZE)).run(session)


def test_an_accuracy_below_its_bound_fails_the_run(session: Session, tmp_path: Path) -> None:
    row = {"context": "In the beginning", "choices": ["God", "xq zzq"], "answer": 1}
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps(row))
    with ResultsStore.open(tmp_path / "results.db") as store:
        with pytest.raises(OutputCheckError, match="accuracy of wrong"):
            Evaluate.of(task=str(path), min=0.5).run(session, Recording(lambda: store))
        (run,) = store.list_runs()
    assert (run.status, run.check.outcome, run.values("accuracy")) == ("failed", "failed", (0.0,))


def test_a_row_that_does_not_fit_is_named_before_the_device_is_asked(
    session: Session, tmp_path: Path
) -> None:
    row = {"context": "In the beginning " * 60, "choices": ["a", "b"], "answer": 0}
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(WrongUseError, match="row 1 of long: "):
        Evaluate.of(task=str(path)).run(session)


def test_a_chat_needs_a_template(session: Session) -> None:
    with pytest.raises(WrongUseError, match="no chat template"):
        Evaluate.of(task=str(CLOZE), chat=True).check(session.model)
    with pytest.raises(WrongUseError, match="give `chat`"):
        Evaluate.of(task=str(CLOZE), system="Be brief.")
