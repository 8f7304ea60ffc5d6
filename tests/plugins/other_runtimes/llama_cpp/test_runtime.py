"""The real llama.cpp on a virtual device, against the model in float on this host."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from buildlib.error_base import QnnfarmError
from harness.devices.device import Device
from harness.errors import HostFileError, PromptTooLongError, RuntimeOutputError, WrongUseError
from harness.results.store import ResultsStore
from harness.runtimes.base import GenerationRequest, RuntimeOptions, SpeedRequest
from harness.runtimes.deployed import RunOutcome
from harness.runtimes.dialog_settings import DialogSettings
from harness.workloads.base import Recording
from harness.workloads.bench import Bench
from harness.workloads.perplexity import Perplexity, float_perplexity
from harness.workloads.session import Session
from plugins.other_runtimes.llama_cpp.output import parse_timings
from plugins.other_runtimes.llama_cpp.runtime import LlamaCppModel, LlamaCppRuntime, open_model
from suites.models import tiny_llama
from tests.plugins.other_runtimes.llama_cpp.description import describe
from tests.system import needs
from tools.tiny_llama.architecture import Architecture
from tools.tiny_llama.gguf_file import write_gguf
from tools.tiny_llama.numpy_model import load_weights, logits
from tools.tiny_llama.tokens import load_tokenizer

pytestmark = pytest.mark.first
PROMPT = "In the beginning God created the heaven and the earth. And God said,"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("llama.cpp")
    folder = tmp_path_factory.mktemp("llama.cpp")
    write_gguf(folder / "tiny.gguf")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaCppModel:
    """KV cache and attention are in float32, which llama-bench refuses."""
    return open_model(describe(folder / "float.yaml", cache_type="f32", flash_attn="off"))


@pytest.fixture(scope="module")
def runtime(virtual_device: Device, model: LlamaCppModel) -> Iterator[LlamaCppRuntime]:
    options = RuntimeOptions(runner_timeout_s=120, telemetry_hz=20)
    made = model.start(virtual_device, virtual_device.properties(), options)
    yield made
    made.clean()


def test_its_perplexity_is_that_of_the_model_in_float(
    model: LlamaCppModel, runtime: LlamaCppRuntime
) -> None:
    """It prints four decimals."""
    windows = model.windows(tiny_llama.heldout_text(), 2)
    assert [len(window.scored) for window in windows] == [95] * 2
    result = runtime.score(windows)
    expected = float_perplexity(tiny_llama.folder(), model.info, windows)
    assert result.perplexity == pytest.approx(expected, abs=1e-4)
    for window, value in zip(windows, result.windows, strict=True):
        alone = float_perplexity(tiny_llama.folder(), model.info, [window])
        assert value == pytest.approx(alone, rel=1e-4)
    assert (result.positions, result.tokens) == ("second_half", 190)


def test_a_model_without_bos_is_scored_without_it(virtual_device: Device, tmp_path: Path) -> None:
    """As a Qwen is: all tokens of a context are of the text."""
    needs("llama.cpp")
    folder = tmp_path / "plain"
    shutil.copytree(tiny_llama.folder(), folder, ignore=shutil.ignore_patterns("lora", "ssd"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    write_gguf(tmp_path / "tiny.gguf", folder)
    exact = {"cache_type": "f32", "flash_attn": "off"}
    path = describe(tmp_path / "it.yaml", tokenizer=str(folder / "tokenizer.json"), **exact)
    model = open_model(path)
    windows = model.windows(tiny_llama.heldout_text(), 2)
    assert [len(window.context) for window in windows] == [97] * 2
    runtime = model.start(virtual_device, virtual_device.properties(), RuntimeOptions())
    result = runtime.score(windows)
    assert runtime.added_tokens(DialogSettings()) == 0
    runtime.clean()
    assert result.perplexity == pytest.approx(
        float_perplexity(folder, model.info, windows), abs=1e-4
    )


def test_a_text_of_two_contexts_is_enough(model: LlamaCppModel, runtime: LlamaCppRuntime) -> None:
    text = tiny_llama.heldout_text()
    (window,) = model.windows(text, 1)
    assert len(window.text) < len(text)
    assert runtime.score([window]).perplexity == pytest.approx(15.5329, abs=1e-4)
    with pytest.raises(WrongUseError, match="wants two contexts of 192"):
        model.windows(text[:600], 1)


def greedy(prompt: str, count: int) -> str:
    """The text that numpy's forward pass gives in float32."""
    folder = tiny_llama.folder()
    architecture, weights = Architecture.load(folder), load_weights(folder)
    tokenizer = load_tokenizer(folder)
    ids = [architecture.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    start = len(ids)
    for _ in range(count):
        ids.append(int(logits(architecture, weights, np.array(ids))[-1].argmax()))
    return str(tokenizer.decode(ids[start:]))


def test_greedy_text_is_that_of_the_model_in_float(runtime: LlamaCppRuntime) -> None:
    prompt = "The LORD is my\n\\n"
    result = runtime.generate(GenerationRequest(8, prompt=prompt))
    assert result.text == greedy(prompt, 8)
    assert result.metrics["generated_tokens"] == 8
    tokens = load_tokenizer(tiny_llama.folder()).encode(prompt, add_special_tokens=False).ids
    assert result.metrics["prompt_tokens"] == 1 + len(tokens)
    assert result.early_end is None


def test_a_lost_end_is_run_again_and_told(
    runtime: LlamaCppRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run is taken for one that lost its timings."""
    logs: list[str] = []

    def parse_later(log: str) -> dict[str, float] | None:
        logs.append(log)
        return parse_timings(log) if len(logs) > 1 else None

    monkeypatch.setattr("plugins.other_runtimes.llama_cpp.runtime.parse_timings", parse_later)
    result = runtime.generate(GenerationRequest(8, prompt=PROMPT))
    assert result.retries == len(logs) - 1 >= 1
    assert result.text == greedy(PROMPT, 8)
    monkeypatch.setattr("plugins.other_runtimes.llama_cpp.runtime.parse_timings", lambda _log: None)
    monkeypatch.setattr("plugins.other_runtimes.llama_cpp.runtime._TRIES", 2)
    with pytest.raises(RuntimeOutputError, match="completion lost the end of its output 2 times"):
        runtime.generate(GenerationRequest(2, prompt="A"))


def test_windows_whose_scores_are_lost_are_scored_again(
    model: LlamaCppModel, runtime: LlamaCppRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = model.windows(tiny_llama.heldout_text(), 2)
    run, short_runs = runtime._run, iter(range(2))

    def run_fewer(program: str, arguments: Sequence[str], times: int = 1) -> RunOutcome:
        fewer = () if next(short_runs, None) is None else ("--chunks", "1")
        return run(program, [*arguments, *fewer], times)

    monkeypatch.setattr(runtime, "_run", run_fewer)
    assert runtime.score(windows).retries >= 2


def test_a_seed_repeats_a_sampled_text(runtime: LlamaCppRuntime) -> None:
    settings = DialogSettings(temp=1.5, seed=7)
    request = GenerationRequest(16, prompt=PROMPT, settings=settings)
    first, again = runtime.generate(request).text, runtime.generate(request).text
    assert first == again
    assert first != greedy(PROMPT, 16)


def test_llama_bench_measures_the_prompt_at_its_depth_and_generation_after_both(
    folder: Path, virtual_device: Device
) -> None:
    model = open_model(describe(folder / "plain.yaml"))
    runtime = model.start(virtual_device, virtual_device.properties(), RuntimeOptions())
    results = list(runtime.measure_speed(SpeedRequest(32, 8, depth_tokens=64, repetitions=3)))
    runtime.clean()
    assert len(results) == 3
    for result in results:
        assert result.metrics["prefill_tokens_per_s"] > 0 < result.metrics["decode_tokens_per_s"]
    prompt, generation = json.loads(results[0].profile)
    assert (prompt["n_prompt"], prompt["n_gen"], prompt["n_depth"]) == (32, 0, 64)
    assert (generation["n_prompt"], generation["n_gen"], generation["n_depth"]) == (0, 8, 96)
    assert prompt["n_threads"] == 1


def test_a_benchmark_is_checked_by_the_perplexity_before_it(
    virtual_device: Device, folder: Path, tmp_path: Path
) -> None:
    model = open_model(describe(folder / "plain.yaml"))
    text = tmp_path / "text.txt"
    text.write_text(tiny_llama.heldout_text())
    reference = str(tiny_llama.folder())
    with (
        ResultsStore.open(tmp_path / "results.db") as store,
        Session(virtual_device, model) as session,
    ):
        recording = Recording(lambda: store)
        scored = Perplexity.of(text=str(text), windows=2, reference=reference)
        assert scored.run(session, recording).values["perplexity_float"] > 1
        bench = Bench.of(prompt_tokens=32, new_tokens=8, repetitions=2, warmup=0)
        run = bench.run(session, recording).output
    assert (run.workload.runtime, run.workload.runner) == ("llama.cpp", "llama-bench")
    assert (run.container.model, run.container.precision) == ("tiny_llama", "F32")
    assert len(run.values("decode_tokens_per_s")) == 2
    assert run.check.outcome == "passed"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "none.gguf"}, "none.gguf"),
        ({"model": "tiny.yaml"}, "it is no GGUF file"),
        ({"threads": "many"}, "threads"),
        ({"n_gpu_layer": 1}, "n_gpu_layer"),
        ({"runtime": "genie"}, "no YAML file with `runtime: llama.cpp`"),
    ],
)
def test_wrong_descriptions_are_refused_in_one_line(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    path = tmp_path / "tiny.yaml"
    content = {"runtime": "llama.cpp", "model": "tiny.gguf", "build": ".", **change}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(QnnfarmError, match=said) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)


def test_what_it_cannot_do_is_refused_before_a_device(
    tmp_path: Path, virtual_device: Device
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    path = tmp_path / "tiny.yaml"
    content = {"runtime": "llama.cpp", "model": "tiny.gguf", "build": "none"}
    path.write_text(yaml.safe_dump(content))
    model = open_model(path)
    assert model.context_length == 512
    with pytest.raises(PromptTooLongError):
        model.check_dialog(DialogSettings(), 500, 13)
    with pytest.raises(WrongUseError, match="stop"):
        model.check_dialog(DialogSettings(stop=("x",)), 8, 8)
    with pytest.raises(WrongUseError, match="tokenizer"):
        model.windows("text")
    with pytest.raises(HostFileError, match="no folder with a build for x86_64"):
        model.check_fit(virtual_device.properties())
