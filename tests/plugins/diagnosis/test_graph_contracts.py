"""Artifacts of other runtimes: imported, run by their graphs, and judged by NumPy in float."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from buildlib.errors import InputFileError
from buildlib.foreign.importer import import_artifact
from buildlib.targets import parse_target
from harness.errors import WrongUseError
from harness.runtimes.registry import open_model
from suites.models import tiny_llama
from tests.conftest import made_once
from tests.device_scripts.conftest import Runner
from tests.plugins.other_runtimes.executorch import half_floats
from tools.tiny_llama.numpy_model import logits

PROMPT = (42, 79, 260, 823, 267, 1240, 13, 269, 260, 624, 79)
ANSWER = 3
TOKENIZER = tiny_llama.folder() / "tokenizer.json"


@pytest.fixture(scope="module")
def pte(build_cache: Path) -> Path:
    folder = made_once(build_cache / "pte", lambda new: half_floats.write_pte(new / "tiny.pte"))
    return folder / "tiny.pte"


@pytest.fixture(scope="module")
def powerserve(build_cache: Path) -> Path:
    folder = made_once(
        build_cache / "powerserve", lambda new: half_floats.write_powerserve(new / "tiny")
    )
    return folder / "tiny"


def answer_in_float() -> list[int]:
    tokens = [half_floats.MODEL.bos_token_id, *PROMPT]
    for _ in range(ANSWER):
        rows = logits(half_floats.MODEL, half_floats.WEIGHTS, np.array(tokens))
        tokens.append(int(rows[-1].argmax()))
    return tokens[-ANSWER:]


@pytest.mark.parametrize("artifact", [pytest.param("pte", marks=pytest.mark.variant), "powerserve"])
def test_an_artifact_answers_as_its_weights_in_float(
    artifact: str, runner: Runner, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source: Path = request.getfixturevalue(artifact)
    target = parse_target("SM8750:emulator")
    container = import_artifact(
        source, tmp_path / "c", target=target, tokenizer=TOKENIZER, bos=0, eos=(1,)
    )
    with pytest.raises(WrongUseError, match="use --runtime graph"):
        open_model(container.path)
    assert open_model(container.path, "graph").path == container.path
    config = json.loads(container.genie_config.to_json())
    config["dialog"]["max-num-tokens"] = ANSWER
    (container.path / "short.json").write_text(json.dumps(config))
    (container.path / "tokens").write_text(" ".join(map(str, PROMPT)))
    done = runner.run("graph_run.py", "-c", "short.json", "-tok", "tokens", cwd=container.path)
    assert done.returncode == 0, done.stderr
    begin = done.stdout.index("[BEGIN]: ") + 9
    answer = done.stdout[begin : done.stdout.rindex("[END]")]
    assert [int(word) for word in answer.split()] == answer_in_float()


def test_sizes_are_those_of_the_graphs(powerserve: Path, tmp_path: Path) -> None:
    container = import_artifact(powerserve, tmp_path / "c", tokenizer=TOKENIZER)
    metadata, context = container.metadata, container.genie_config.dialog.context
    assert metadata.graphs.auto_regression_numbers == (1, 8)
    assert (metadata.graphs.context_length, metadata.graphs.splits) == (41, 3)
    assert (context.n_vocab, context.bos_token, context.eos_token) == (1280, 0, 1)
    assert metadata.target.name == "SM8750"
    assert metadata.target.weight_sharing  # of which PowerServe's files say nothing


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokenizer": None}, r"it lacks a tokenizer \(--tokenizer FILE\)"),
        ({"target": parse_target("SM8650")}, "its binaries are for SM8750, not for SM8650"),
        ({"eos": (1280,)}, "its graphs know 1280 tokens, and --eos is 1280"),
        ({"eos": (-1,)}, "--eos is -1"),
    ],
)
def test_what_does_not_fit_the_graphs_is_refused(
    given: dict[str, object], said: str, powerserve: Path, tmp_path: Path
) -> None:
    facts: dict[str, object] = {"tokenizer": TOKENIZER, **given}
    with pytest.raises(InputFileError, match=said):
        import_artifact(powerserve, tmp_path / "c", **facts)  # type: ignore[arg-type]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("qnn/config.json", lambda text: text.replace("tiny_0", "../tiny_0"), "model_path"),
        ("qnn/config.json", lambda text: text.replace("embeddings", "other"), "logits on the CPU"),
        ("qnn/config.json", lambda text: text.replace("{", '{"vision": 1, ', 1), "images"),
        ("qnn/config.json", lambda _: "[]", "must be"),
        ("model.json", lambda text: text.replace("rope_dim", "rope"), "rope_dim"),
        ("vocab.gguf", lambda _: "GGUF" * 9, "it is no GGUF"),
    ],
)
def test_a_damaged_folder_is_one_line(
    file: str, change: Callable[[str], str], said: str, powerserve: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    for path in powerserve.rglob("*"):
        if path.is_file():
            copy = folder / path.relative_to(powerserve)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path.resolve())
    text = (folder / file).read_bytes().decode(errors="replace")
    (folder / file).unlink()
    (folder / file).write_text(change(text))
    with pytest.raises(Exception, match=said) as caught:
        import_artifact(folder, tmp_path / "c", tokenizer=TOKENIZER)
    assert "\n" not in str(caught.value)
