"""Runtimes of phones, whose programs cannot run here: their order and argv, by stand-ins.

A stand-in takes the documented options alone, reads what it is given, and writes the documented
report of it.
"""

import shutil
import stat
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from harness.devices.device import Device
from harness.errors import RunnerError, RuntimeOutputError, WrongUseError
from harness.results.store import ResultsStore
from harness.runtimes.base import Generates, GenerationRequest, MeasuresSpeed, SpeedRequest
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.registry import open_model
from harness.workloads.base import Recording
from harness.workloads.bench import Bench
from harness.workloads.session import Session
from suites.models import tiny_llama
from tests.system import needs

GENIEX = """\
#!/usr/bin/env python3
import argparse, json, os, sys
assert os.environ["LD_LIBRARY_PATH"] == "./lib:./lib/llama_cpp", os.environ["LD_LIBRARY_PATH"]
assert os.path.isfile(os.environ["GENIEX_PLUGIN_PATH"] + "/libgeniex.so")
assert os.path.isfile("lib/llama_cpp/libllama.so")
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--plugin", choices=("llama_cpp", "qairt"), required=True)
parser.add_argument("--device", choices=("cpu", "gpu", "npu", "hybrid", "auto"))
parser.add_argument("-m", required=True)
for flag, default in (("-p", 512), ("-n", 128), ("-r", 5), ("-c", 0), ("-t", 0), ("-ngl", -1)):
    parser.add_argument(flag, type=int, default=default)
parser.add_argument("--warmup", type=int, default=1)
parser.add_argument("--power-mode", choices=("burst", "balanced"))
parser.add_argument("--output-json")
o = parser.parse_args()
if not os.path.exists(o.m) or o.r < 1 or o.p < 1:
    sys.exit("ERROR: --model")
runs = [
    {"run_idx": i, "ttft_us": 49758, "prompt_time_us": 49748, "decode_time_us": 2101000,
     "prompt_tokens": o.p, "gen_tokens": o.n, "prefill_tps": 100.0 + i, "decode_tps": 60.0 + i,
     "stop_reason": "length"}
    for i in range(o.r)
]
report = {"schema_version": "2", "plugin": o.plugin, "device": o.device, "model_path": o.m,
          "params": {"n_ctx": o.c, "n_threads": o.t, "n_gpu_layers": o.ngl}, "runs": runs}
with open(o.output_json, "w") as file:
    json.dump(report, file)
print(f"[ok  ] cell  plugin={o.plugin} device={o.device} ngl={o.ngl}")
"""
"""Options as in GenieX's `sdk/benchmark/options.c`, BSD-3-Clause."""

EXECUTORCH = """\
#!/usr/bin/env python3
import argparse, json, os, struct, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for flag in ("decoder_model_version", "model_path", "output_path", "performance_output_path",
             "tokenizer_path", "prompt", "tokenized_prompt"):
    parser.add_argument("--" + flag)
parser.add_argument("--temperature", type=float, default=0.0)
parser.add_argument("--seq_len", type=int, default=128)
parser.add_argument("--eval_mode", type=int, choices=(0, 1, 2), default=1)
o = parser.parse_args()
if o.decoder_model_version not in ("llama2", "llama3", "qwen3"):
    sys.exit("Unsupported Decoder Model")
for path in (o.model_path, o.tokenizer_path, "libqnn_executorch_backend.so", "libQnnHtp.so"):
    assert os.path.isfile(path), path
assert not (o.prompt and o.tokenized_prompt)
with open(o.tokenized_prompt, "rb") as file:
    content = file.read()
tokens = struct.unpack("<%dQ" % (len(content) // 8), content)
assert len(tokens) < o.seq_len, "sequence length exceeded"
new = o.seq_len - len(tokens)
stats = {"prompt_tokens": len(tokens), "generated_tokens": new - 1,
         "model_load_start_ms": 1000, "model_load_end_ms": 1887, "inference_start_ms": 1887,
         "inference_end_ms": 1943 + 20 * (new - 1), "prompt_eval_end_ms": 1943,
         "first_token_ms": 1943, "aggregate_sampling_time_ms": 71,
         "SCALING_FACTOR_UNITS_PER_SECOND": 1000}
print("I 00:00:00.000647 executorch:runner.cpp:149] creating module", file=sys.stderr)
print("PyTorchObserver " + json.dumps(stats, separators=(",", ":")))
with open(o.output_path, "w") as file:
    file.write(o.tokenized_prompt + " and it was so, said " + " ".join(map(str, tokens[:3])))
with open(o.performance_output_path, "w") as file:
    file.write("53.9")
"""
"""Options as in ExecuTorch's `qnn_llama_runner.cpp`, BSD-3-Clause."""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.name)


def library(path: Path) -> None:
    """Some library for the device's processor: others are refused before the push."""
    path.parent.mkdir(parents=True, exist_ok=True)
    needs("libatomic1")
    shutil.copy(next(Path("/usr/lib").glob("*-linux-gnu*/libatomic.so.1")), path)


@pytest.fixture
def geniex(tmp_path: Path) -> Path:
    """A description, with an installed GenieX and a bundle of QAIRT as the model."""
    program(tmp_path / "pkg/bin/geniex-bench", GENIEX)
    for name in ("libgeniex.so", "llama_cpp/libllama.so"):
        library(tmp_path / "pkg/lib" / name)
    file(tmp_path / "Qwen3-4B/genie_config.json")
    content = {
        "runtime": "geniex-bench", "model": "Qwen3-4B", "build": "pkg", "plugin": "qairt",
        "device": "npu", "context_length": 4096, "threads": 4,
        "arguments": ["--power-mode", "burst"],
    }  # fmt: skip
    path = tmp_path / "qwen.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def executorch(tmp_path: Path) -> Path:
    """A description, with a build folder of ExecuTorch as CMake leaves it."""
    build = tmp_path / "build-android"
    program(build / "examples/qualcomm/oss_scripts/llama/qnn_llama_runner", EXECUTORCH)
    library(build / "backends/qualcomm/libqnn_executorch_backend.so")
    library(build / "lib/libQnnHtp.so")
    file(tmp_path / "hybrid_llama_qnn.pte")
    content = {
        "runtime": "executorch", "model": "hybrid_llama_qnn.pte", "build": "build-android",
        "tokenizer": str(tiny_llama.folder() / "tokenizer.json"),
        "decoder_model_version": "llama3", "context_length": 512,
    }  # fmt: skip
    path = tmp_path / "llama.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_benchmark_by_geniex_bench(virtual_device: Device, geniex: Path) -> None:
    with (
        ResultsStore.open(geniex.with_name("results.db")) as store,
        Session(virtual_device, open_model(geniex, "geniex-bench")) as session,
    ):
        bench = Bench.of(prompt_tokens=64, new_tokens=16, repetitions=3, warmup=0)
        run = bench.run(session, Recording(lambda: store)).output
    assert run.values("prefill_tokens_per_s") == (100, 101, 102)
    assert run.values("decode_tokens_per_s") == (60, 61, 62)
    assert run.values("ttft_s") == pytest.approx((0.049758,) * 3)
    assert run.values("prompt_tokens") == (64,) * 3
    assert (run.workload.runner, run.container.model) == ("geniex-bench", "Qwen3-4B")
    program = geniex.with_name("pkg") / "bin/geniex-bench"
    assert run.workload.runner_sha256 == sha256(program.read_bytes()).hexdigest()


def test_a_benchmark_and_prompts_by_executorch(virtual_device: Device, executorch: Path) -> None:
    with (
        ResultsStore.open(executorch.with_name("results.db")) as store,
        Session(virtual_device, open_model(executorch, "executorch")) as session,
    ):
        bench = Bench.of(prompt_tokens=32, new_tokens=8, repetitions=2, warmup=0)
        run = bench.run(session, Recording(lambda: store)).output
        runtime = session.require(Generates)
        result = runtime.generate(GenerationRequest(16, prompt="In the"))
        again = runtime.generate(GenerationRequest(16, token_ids=(5, 6, 7)))
    assert run.values("prompt_tokens") == (32, 32)
    assert run.workload.runner == "qnn_llama_runner"
    assert result.text.startswith(" and it was so")
    assert result.metrics["decode_tokens_per_s"] == pytest.approx(50)
    assert result.metrics["prefill_tokens_per_s"] == pytest.approx(4 / 0.056, rel=0.5)
    assert again.text.endswith("said 5 6 7")
    assert again.metrics["init_s"] == pytest.approx(0.887)


def test_a_program_that_refuses_or_reports_nothing_is_told(
    virtual_device: Device, geniex: Path, executorch: Path
) -> None:
    content = yaml.safe_load(geniex.read_text()) | {"arguments": ["--power-mode", "warp"]}
    geniex.write_text(yaml.safe_dump(content))
    with (
        Session(virtual_device, open_model(geniex, "geniex-bench")) as session,
        pytest.raises(RunnerError, match="warp"),
    ):
        list(session.require(MeasuresSpeed).measure_speed(SpeedRequest(8, 4)))
    folder = executorch.parent / "build-android/examples/qualcomm/oss_scripts/llama"
    program(folder / "qnn_llama_runner", EXECUTORCH.replace("PyTorchObserver", "Observer"))
    with (
        Session(virtual_device, open_model(executorch, "executorch")) as session,
        pytest.raises(RuntimeOutputError, match="reported 0 queries"),
    ):
        session.require(Generates).generate(GenerationRequest(16, prompt="In the"))


@pytest.mark.needs("plugins.other_runtimes")
@pytest.mark.parametrize("runtime", ["geniex-bench", "executorch"])
def test_what_they_cannot_do_is_refused_before_a_device(
    geniex: Path, executorch: Path, runtime: str
) -> None:
    model = open_model(geniex if runtime == "geniex-bench" else executorch, runtime)
    with pytest.raises(WrongUseError, match="no depth"):
        model.check_dialog(DialogSettings(), 8, 8, depth_tokens=8)
    with pytest.raises(WrongUseError, match=runtime):
        model.check_dialog(DialogSettings(stop=("x",)), 8, 8)
    with pytest.raises(WrongUseError, match="scores no texts"):
        model.windows("text")


@pytest.mark.needs("plugins.other_runtimes", "plugins.diagnosis")
def test_a_runtime_that_runs_another_kind_of_model_names_those_that_run_it(
    geniex: Path, executorch: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.yaml"
    text.write_text("name: x")
    for path, runtime, told in (
        (geniex, "genie", "--runtime geniex-bench does"),
        (executorch, "llama.cpp", "--runtime executorch does"),
        (tmp_path, "llama.cpp", "--runtime genie or graph does"),
        (text, "llama.cpp", r"no YAML file with `runtime: llama\.cpp`"),
    ):
        with pytest.raises(WrongUseError, match=told):
            open_model(path, runtime)
