"""mllm's runners by stand-ins, which take their options alone and print as they do."""

import os
import re
from pathlib import Path

import pytest
import yaml

from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from harness.devices.device import Device
from harness.errors import HostFileError, RunnerError, RuntimeOutputError, WrongUseError
from harness.results.store import ResultsStore
from harness.runtimes.base import GenerationRequest, RuntimeOptions
from harness.runtimes.dialog_settings import DialogSettings
from harness.runtimes.registry import open_model
from harness.workloads.base import Recording
from harness.workloads.bench import Bench
from harness.workloads.session import Session
from plugins.mllm.config import write_config
from plugins.mllm.context import MllmFiles, plan_context
from plugins.mllm.runtime import parse_answer, parse_summary
from tests.buildlib.conftest import MakeCheckpoint
from tests.command_line import qnnfarm
from tests.harness.runtimes.test_stand_ins import library, program
from tests.plugins.mllm.mllm_files import write_files

CL = 1024
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}

_OPTIONS = """\
#!/usr/bin/env python3
import os, sys, time
known = {"-m": 0, "--model": 0, "-t": 1, "--tokenizer": 1, "-c": 2, "--config": 2, "--ar_len": 3}
words = sys.argv[1:]
given = [None, None, None, "128"]
while words:
    flag = words.pop(0)
    if flag not in known or not words:
        print("Unknown option: " + flag)
        os.abort()
    if isinstance(known[flag], int):
        given[known[flag]] = words.pop(0)
    else:
        globals()[known[flag]] = int(words.pop(0))
def log(text):
    color, plain = "\\x1b[1m\\x1b[38;2;000;128;000m", "\\x1b[0m"
    sys.stdout.write(f"{color}[INFO]{plain} /mllm/Log.cpp:12 {text}\\n")
for path in given[:3]:
    assert os.path.isfile(path), path
assert given[3] == "32", "Graph model.0.s%s not found" % given[3]
log("QNN Backend Build Id: v2.41")
"""
"""Options as `Argparse` of mllm takes them, MIT; lines of its log as its `Log.hpp` prints them."""

QWEN3 = (
    _OPTIONS
    + """\
sys.stdout.write("💬 Prompt text (or 'exit/quit'): ")
sys.stdout.flush()
prompt = sys.stdin.readline().rstrip("\\n")
log("num_tokens: %d" % (12 + len(prompt)))
time.sleep(0.3)
for token in "Ďďēe" + prompt[:2] + "<|im_end|>" * ("x" in prompt):
    sys.stdout.write(token)
    sys.stdout.flush()
    time.sleep(0.05)
sys.stdout.write("\\n")
log("QNN Perf destroyed")
"""
)
"""Output as of `examples/qwen3_qnn_aot/aot_run.cpp`."""

QWEN2 = (
    _OPTIONS.replace("known = {", 'known = {"--seq_len": "seq", "--gen_len": "gen", ')
    + """\
print("[1, %d]" % seq)
print("".join("token" for _ in range(gen)))
cyan, plain = "\\x1b[38;2;000;255;255m", "\\x1b[0m"
print(f"{cyan}\\n============== Performance Summary ===============\\n{plain}")
for label, us, count in (("Prefill time", 250000.0, seq), ("Decode time", 1000000.0, gen)):
    print(f"{cyan}{label:<20}: {plain}{us:>10.2f} μs ({count / us * 1e6:>6.2f} tokens/s)")
print(f"{'Prefill tokens':<20}: {seq:>10}")
print(f"{'Decode tokens':<20}: {gen:>10}")
"""
)
"""Output as of `QnnAOTRuntime.cpp` with its summary."""


@pytest.fixture(scope="module")
def compiled(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple[MllmFiles, Path]:
    folder = tmp_path_factory.mktemp("compiled")
    files = write_files(make_checkpoint, folder / "m", cl=CL, num_hidden_layers=1, **HEADS)
    cache, toolchain = folder / "cache", OrtQnnToolchain()
    outputs = plan_context(files, "m", 32, files.target(), cache, toolchain).outputs()
    return files, outputs.binaries[0]


@pytest.fixture
def described(compiled: tuple[MllmFiles, Path], tmp_path: Path) -> Path:
    files, binary = compiled
    build, packages = tmp_path / "bin", tmp_path / "packages"
    for family, text in (("qwen3", QWEN3), ("qwen2", QWEN2)):
        program(build / f"mllm-{family}-aot-runner", text)
    for name in ("libMllmRT.so", "libQnnHtp.so"):
        library(build / name)
    library(packages / "aarch64-android/libQnnLLaMAPackage.so")
    library(packages / "hexagon-v79/libQnnLLaMAPackage.so")  # of the emulator
    content = {
        "runtime": "mllm", "model": str(binary), "build": "bin", "name": "tiny",
        "tokenizer": str(files.tokenizer), "config": str(files.config_file),
        "op_packages": "packages",
    }  # fmt: skip
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.needs("libatomic1")
def test_an_answer_and_its_clock(virtual_device: Device, described: Path) -> None:
    model = open_model(described, "mllm")
    runtime = model.start(virtual_device, virtual_device.properties(), RuntimeOptions())
    result = runtime.generate(GenerationRequest(64, prompt="xy"))  # type: ignore[attr-defined]
    names = {each.name for each in runtime.prepare().files}
    with pytest.raises(WrongUseError, match="one line"):
        runtime.generate(GenerationRequest(64, prompt="x\ny"))  # type: ignore[attr-defined]
    runtime.clean()
    assert result.text == "Ďďēexy"
    metrics = result.metrics
    assert (metrics["prompt_tokens"], metrics["generated_tokens"] >= 6) == (14, True)
    assert metrics["ttft_s"] > 0  # a busy machine sees the beginning of the program late
    assert metrics["decode_tokens_per_s"] <= 20 * metrics["generated_tokens"] / 6
    assert str(result.early_end).endswith("an end-of-sequence token")
    assert {"libQnnLLaMAPackage_CPU.so", "libQnnLLaMAPackage_HTP.so", "libMllmRT.so"} <= names


@pytest.mark.needs("libatomic1")
def test_a_benchmark_by_the_summary_of_qwen_2(
    virtual_device: Device, described: Path, compiled: tuple[MllmFiles, Path]
) -> None:
    config = compiled[0].config.model_copy(update={"model_type": "qwen2"})
    write_config(described.parent / "config_2.json", config)
    content = yaml.safe_load(described.read_text()) | {"config": "config_2.json"}
    described.write_text(yaml.safe_dump(content))
    model = open_model(described, "mllm")
    with (
        ResultsStore.open(described.with_name("results.db")) as store,
        Session(virtual_device, model) as session,
    ):
        bench = Bench.of(prompt_tokens=64, new_tokens=16, repetitions=2, warmup=0)
        run = bench.run(session, Recording(lambda: store)).output
    assert run.values("prefill_tokens_per_s") == pytest.approx((256, 256))
    assert run.values("decode_tokens_per_s") == pytest.approx((16, 16))
    assert (run.workload.runner, run.workload.runtime) == ("mllm-qwen2-aot-runner", "mllm")


@pytest.mark.needs("libatomic1")
def test_what_the_runner_cannot_run_is_refused_before_a_device(
    described: Path, compiled: tuple[MllmFiles, Path], small_bundle: Path
) -> None:
    def changed(**keys: object) -> Path:
        path = described.with_name("changed.yaml")
        path.write_text(yaml.safe_dump(yaml.safe_load(described.read_text()) | keys))
        return path

    with pytest.raises(WrongUseError, match=r"no graph model\.0\.s128, but model\.0\.s1, "):
        open_model(changed(ar_len=128), "mllm")
    genies = next(small_bundle.glob("*.bin"))
    with pytest.raises(WrongUseError, match=r"no graph model\.0\.s1, but ar1_"):
        open_model(changed(model=str(genies)), "mllm")
    with pytest.raises(HostFileError, match="it is no file"):
        open_model(changed(tokenizer="none.json"), "mllm")
    model = open_model(described, "mllm")
    with pytest.raises(WrongUseError, match="without settings"):
        model.check_dialog(DialogSettings(temp=0.5), 8, 8)
    with pytest.raises(WrongUseError, match="no depth"):
        model.check_dialog(DialogSettings(), 8, 8, depth_tokens=8)


@pytest.mark.needs("libatomic1")
def test_a_runner_that_fails_says_why(virtual_device: Device, described: Path) -> None:
    program(described.parent / "bin/mllm-qwen3-aot-runner", QWEN3.replace("num_tokens", "tokens"))
    options = (
        (yaml.safe_load(described.read_text()), RuntimeOutputError, "number of tokens"),
        (
            yaml.safe_load(described.read_text()) | {"arguments": ["--warp"]},
            RunnerError,
            "signal 6",
        ),
    )
    for content, error, said in options:
        described.write_text(yaml.safe_dump(content))
        runtime = open_model(described, "mllm").start(
            virtual_device, virtual_device.properties(), RuntimeOptions()
        )
        with pytest.raises(error, match=said):
            runtime.generate(GenerationRequest(8, prompt="a"))  # type: ignore[attr-defined]
        runtime.clean()


def test_an_output_without_an_answer_is_refused() -> None:
    asked = b"Prompt text (or 'exit/quit'): "
    log = b"[INFO] /a.cpp:1 num_tokens: 3\n"
    for printed, clock, said in (
        (b"", "1.00 0", "number of tokens"),
        (asked, "1.00 0\n1.10 30", "number of tokens"),
        (asked + log, "1.00 0\n1.10 60", "empty"),
        (asked + log + b"ab\n", "1.00 0\n1.10 30", "ends early"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_answer(printed, clock)
    answer = parse_answer(
        asked + log + b"a[INFO] b\n", f"1.00 0\n1.25 30\n2.00 {60 + 1}\n4.00 {60 + 10}"
    )
    assert (answer.text, answer.init_s, answer.ttft_s) == ("a[INFO] b", 0.25, 0.75)
    assert answer.decode_s == 2.0
    with pytest.raises(ValueError, match="no Performance Summary"):
        parse_summary("Prefill time : 1 us")


@pytest.mark.needs("libatomic1")
def test_push_and_run_by_the_command(
    virtual_device: Device, described: Path, compiled: tuple[MllmFiles, Path]
) -> None:
    files, binary = compiled
    context = described.parent / "m.bin"
    context.write_bytes(binary.read_bytes())
    shared = [
        "-m", str(context), "-c", str(files.config_file), "-t", str(files.tokenizer),
        "--build", str(described.parent / "bin"), "--device", virtual_device.serial,
    ]  # fmt: skip
    refused = qnnfarm("aot", "push", *shared)
    assert refused.returncode == 2
    assert "--checkpoint" in refused.stderr
    first, again = (qnnfarm("aot", "push", *shared, "--unchecked") for _ in range(2))
    assert re.search(r"m\.bin|model\.bin +[\d.]+ \w+ +(pushed|was there)", first.stdout)
    assert "0 B pushed" in again.stdout
    assert yaml.safe_load(context.with_suffix(".yaml").read_text())["runtime"] == "mllm"
    answer = qnnfarm("aot", "run", *shared, "--prompt", "xy")
    assert answer.stdout.startswith("Ďďēexy")


COMPILER = """\
#!/usr/bin/env python3
import os, shutil, sys
known = {"-m", "-c", "--aot_config", "--qnn_env_path", "-o"}
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert set(given) <= known and len(sys.argv) == 1 + 2 * len(given), sys.argv
assert all(os.path.isfile(given[flag]) for flag in ("-m", "-c", "--aot_config"))
assert os.path.isfile(given["--qnn_env_path"] + "libQnnHtp.so"), "libQnnHtp.so failed"
open("qwen3_qnn_aot_sha_32.mir", "w").close()
shutil.copyfile(os.environ["CONTEXT"], given["-o"])
"""
"""Options as of `examples/qwen3_qnn_aot/compile_sha.cpp`, which joins the path as it does."""


@pytest.mark.needs("libatomic1")
def test_mllms_own_compiler_is_called_as_documented(
    compiled: tuple[MllmFiles, Path], tmp_path: Path
) -> None:
    files, binary = compiled
    program(tmp_path / "build/bin/mllm-qwen3-aot-sha-c", COMPILER)
    library(tmp_path / "qnn/libQnnHtp.so")
    words: list[str | Path] = [
        "aot", "compile", "-m", files.parameters, "-c", files.config_file, "--aot_config",
        files.aot_file, "--toolchain", "mllm", "--mllm-build", tmp_path / "build",
    ]  # fmt: skip
    env = dict(os.environ) | {"CONTEXT": str(binary)}
    done = qnnfarm(*words, "--qnn_env_path", tmp_path / "qnn", "-o", "q.bin", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "q.bin").read_bytes() == binary.read_bytes()
    assert not list(tmp_path.glob("*.mir"))
    failed = qnnfarm(*words, "--qnn_env_path", tmp_path, "-o", "r.bin", cwd=tmp_path, env=env)
    assert not (tmp_path / "r.bin").exists()
    assert (failed.returncode > 0, "libQnnHtp.so failed" in failed.stderr) == (True, True)
    (tmp_path / "build/bin/mllm-qwen3-aot-sha-c").unlink()
    missing = qnnfarm(*words, "-o", "r.bin", cwd=tmp_path, env=env)
    assert "task.py tasks/build_x86_qnn_aot.yaml" in missing.stderr


@pytest.mark.needs("libatomic1")
def test_compile_refuses_before_it_begins(compiled: tuple[MllmFiles, Path], tmp_path: Path) -> None:
    files, _ = compiled
    words: list[str | Path] = [
        "aot", "compile", "-m", files.parameters, "-c", files.config_file, "--aot_config",
        files.aot_file,
    ]  # fmt: skip
    for more, said in (
        (("--toolchain", "qairt"), "no dots"),
        (("--toolchain", "mllm", "--ar", "16"), "leave out"),
        (("--qnn_env_path", "x"), "belong to --toolchain mllm"),
        (("-o", "x.txt"), "ends in .bin"),
        (("-t", "none.json"), "name it with -t"),
    ):
        done = qnnfarm(*words, *more, cwd=tmp_path)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
        assert not list(tmp_path.iterdir())
