"""The graph runtime on the emulator beside the real Genie, on the same containers."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from buildlib.builder_options import apply_options
from buildlib.genai import GenAIBuilderFactory
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from suites.models import tiny_llama
from tests.device_scripts.conftest import Runner, last_query, shortened

PROMPT = "42 79 260 823 267 1240"
CONFIG = ("-c", "genie_config.json")


def ids(stdout: str) -> list[int]:
    begin = stdout.index("\n[BEGIN]: ") + 10
    return [int(word) for word in stdout[begin : stdout.rindex("[END]")].split()]


@pytest.fixture
def short_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """The reference model with answers of three tokens."""
    folder = shortened(tiny_bundle, tmp_path, 3)
    (folder / "tokens").write_text(PROMPT)
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "genie_config.json").unlink()
    (folder / "genie_config.json").write_text(json.dumps(config))


def test_tokens_are_those_of_genie(runner: Runner, short_bundle: Path) -> None:
    asked = (*CONFIG, "-tok", "tokens")
    theirs = runner.run("genie_t2t_run.py", *asked, "--profile", "genie.json", cwd=short_bundle)
    files = ("--profile", "graph.json", "--trace", "trace.json", "--clock", "clock.json")
    ours = runner.run("graph_run.py", *asked, *files, cwd=short_bundle)
    assert ours.returncode == 0, ours.stderr
    assert ids(ours.stdout) == ids(theirs.stdout)
    assert len(ids(ours.stdout)) == 3

    theirs_said, said = (last_query(short_bundle / name) for name in ("genie.json", "graph.json"))
    for key, figure in theirs_said.items():
        if key.startswith("num-"):
            assert said[key] == figure
        elif "-" in key:
            assert said[key]["unit"] == figure["unit"]
    events = json.loads((short_bundle / "trace.json").read_text())["traceEvents"]
    graphs = [event["args"] for event in events if event["cat"] == "function"]
    calls = dict.fromkeys((one["first"], one["tokens"]) for one in graphs)
    assert list(calls) == [(0, 7), *((n, 1) for n in range(7, 9))]
    assert len(json.loads((short_bundle / "clock.json").read_text())["pieces"]) == 3

    # Tokens that fill the context come before the prompt.
    first, _, rest = PROMPT.partition(" ")
    (short_bundle / "fill").write_text(first)
    (short_bundle / "tokens").write_text(rest)
    halves = ("-tok", "tokens", "--fill_file", "fill", "--profile", "p.json")
    filled = runner.run("graph_run.py", *CONFIG, *halves, cwd=short_bundle)
    assert ids(filled.stdout) == ids(ours.stdout)
    assert last_query(short_bundle / "p.json")["num-prompt-tokens"]["value"] == 5


def test_graphs_are_described(runner: Runner, short_bundle: Path) -> None:
    done = runner.run("graph_run.py", *CONFIG, "--describe", cwd=short_bundle)
    described = json.loads(done.stdout)
    read = [OrtQnnToolchain().inspect(binary).graphs for binary in short_bundle.glob("*.bin")]
    graphs = {name: one for chain in described["chains"] for name, one in chain["graphs"].items()}
    assert graphs.keys() == {graph.name for part in read for graph in part}
    for graph in (graph for part in read for graph in part):
        for tensor in graph.inputs:
            port = graphs[graph.name]["inputs"][tensor.name]
            assert tuple(port["shape"]) == tensor.shape
            if tensor.encoding is not None:
                assert math.isclose(port["scale"], tensor.encoding.scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampler": {"version": 1, "temp": 0.8, "top-k": 40}}, "chooses greedily"),
        ({"context": None}, "is no configuration"),
    ],
)
def test_configurations_beyond_it_are_refused(
    runner: Runner, short_bundle: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((short_bundle / "genie_config.json").read_text())
    config["dialog"] |= change
    write_config(short_bundle, config)
    done = runner.run("graph_run.py", *CONFIG, "-tok", "tokens", cwd=short_bundle)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_damaged_files_end_in_one_line(runner: Runner, short_bundle: Path) -> None:
    binary = min(short_bundle.glob("*.bin"))
    data = binary.read_bytes()
    binary.unlink()
    binary.write_bytes(data[: len(data) // 2])
    done = runner.run("graph_run.py", *CONFIG, "-tok", "tokens", cwd=short_bundle)
    assert done.returncode == 1
    assert "graph-run: error: " in done.stderr.splitlines()[-1]


def test_tokens_outside_of_the_vocabulary_are_refused(runner: Runner, short_bundle: Path) -> None:
    (short_bundle / "tokens").write_text("5 1280")
    done = runner.run("graph_run.py", *CONFIG, "-tok", "tokens", cwd=short_bundle)
    assert done.returncode == 1
    assert "token 1280 is outside the vocabulary of 1280" in done.stderr


BUILDS: dict[str, dict[str, object]] = {
    "one part": {},
    "two contexts": {"arn_cl_options.context_length": (96, 192)},
    "AR 128, two parts, host embedding": {
        "arn_cl_options.auto_regression_number": (1, 128),
        "arn_cl_options.context_length": (384,),
        "split_model.num_splits": 2,
        "prepare_embedding_lut": True,
    },
}
ANSWER = 24
ALL_PROMPTS = """
import json, sys
import genie_api, genie_t2t_run, graph_model, graph_run
model = graph_model.LoadedModel(graph_model.Settings.read("genie_config.json"))
answers = []
for prompt in json.load(open("prompts")):
    model.reset()
    asked = [model.settings.bos, *prompt]
    times = graph_run.TimeRecorder(), genie_t2t_run.TokenClock()
    answers.append(list(graph_run.generate(model, asked, int(sys.argv[1]), *times)))
print(json.dumps(answers))
genie_api.leave(0)
"""


@pytest.mark.variant
@pytest.mark.parametrize("options", BUILDS.values(), ids=BUILDS)
def test_twenty_prompts_are_answered_as_by_genie(
    runner: Runner, options: dict[str, object], build_cache: Path, tmp_path: Path
) -> None:
    """Lengths around whole calls and up to the longest, on each kind of build of the suites."""
    defaults = {
        "arn_cl_options.auto_regression_number": (1, 32),
        "arn_cl_options.context_length": (192,),
        "split_model.num_splits": 1,
    }
    builder = GenAIBuilderFactory.create(tiny_llama.folder(), cache_root=build_cache)
    apply_options(builder.set_targets(["SM8750:emulator"]), {**defaults, **options})
    container = builder.build()
    graphs = container.metadata.graphs
    ar, longest = max(graphs.auto_regression_numbers), graphs.context_length
    longest -= max(ar, ANSWER + 1)
    tokenizer = tokenizers.Tokenizer.from_file(str(container.files["tokenizer.json"]))
    text = tokenizer.encode(tiny_llama.heldout_text(), add_special_tokens=False).ids
    random = np.random.default_rng(0)
    lengths = [1, 2, ar - 2, ar - 1, ar, ar + 1, longest - 1, longest]
    lengths += [int(one) for one in random.integers(1, longest, 20 - len(lengths))]
    bundle = tmp_path / "bundle"
    shutil.copytree(container.path, bundle)
    config = json.loads((bundle / "genie_config.json").read_text())
    config["dialog"]["max-num-tokens"] = ANSWER
    (bundle / "genie_config.json").write_text(json.dumps(config))
    script = ["dialog config create c genie_config.json", "dialog create d c"]
    prompts = []
    for number, length in enumerate(lengths):
        begin = int(random.integers(len(text) - length))
        prompts.append(text[begin : begin + length])
        (bundle / f"tokens{number}").write_text(" ".join(map(str, prompts[-1])))
        script += [f"dialog tokenQuery d tokens{number} genie{number}", "dialog reset d"]
    (bundle / "script").write_text("\n".join(script))
    done = runner.run("genie_app.py", "-s", "script", cwd=bundle, timeout_s=1500)
    assert done.returncode == 0, done.stderr
    theirs = [
        [int(word) for word in (bundle / f"genie{number}").read_text().split()]
        for number in range(len(lengths))
    ]
    (bundle / "prompts").write_text(json.dumps(prompts))
    command = [sys.executable, "-c", ALL_PROMPTS, str(ANSWER)]
    ours = subprocess.run(
        command, cwd=bundle, env=runner.environment, capture_output=True, text=True, check=True
    )
    assert json.loads(ours.stdout.splitlines()[-1]) == theirs
    assert all(theirs)
