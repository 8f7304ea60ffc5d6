"""The real Genie on a virtual device, against the host's own loop over the same graphs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import device_scripts
from buildlib.builder.build import BuildOutputs
from buildlib.checkpoint.config import load_config
from buildlib.container.container import GenAIContainer
from buildlib.numerics.emulator import emulator_chains
from buildlib.numerics.evaluation import onnx_perplexity
from buildlib.numerics.host_loop import HostLoop
from buildlib.toolchains.base import emulated_s
from buildlib.toolchains.ort_qnn.toolchain import OrtQnnToolchain
from buildlib.toolchains.ort_qnn.wheel import find_libraries
from harness.devices.base import PushItem
from harness.devices.device import Device
from harness.errors import (
    DeploymentCorruptError,
    DeviceTimeoutError,
    PromptTooLongError,
    RunnerError,
    RuntimeChoiceError,
    RuntimeOutputError,
)
from harness.runtimes.base import Generates, GenerationRequest, RuntimeOptions
from harness.runtimes.genie.runtime import GenieModel, GenieRuntime
from plugins.virtual_android import manager
from plugins.virtual_android.faults import Corrupt, Stall
from suites.models import tiny_llama

PROMPT = "In the beginning God created the heaven and the earth. And God said,"


def processes_of_runs(device: Device) -> str:
    """Processes of runs on the device; another one that is not confined may share its kernel."""
    marks = "grep -lsa QNNFARM_MARKS=.*run: /proc/[0-9]*/environ"
    command = f"{marks} | xargs -r grep -lsa {device.work_root} || true"
    return device.shell(command).stdout


@pytest.fixture(scope="module")
def container(tiny_bundle: Path) -> GenAIContainer:
    return GenAIContainer.load(tiny_bundle)


@pytest.fixture(scope="module")
def runtime(virtual_device: Device, container: GenAIContainer) -> Iterator[GenieRuntime]:
    made = GenieRuntime(
        virtual_device, virtual_device.properties(), container, RuntimeOptions(runner_timeout_s=120)
    )
    yield made
    made.clean()


MakeRuntime = Callable[..., GenieRuntime]


@pytest.fixture
def make_runtime(virtual_device: Device) -> Iterator[MakeRuntime]:
    """Starts runtimes of a test's own, which are cleaned at its end."""
    with ExitStack() as stack:

        def make(container: GenAIContainer, options: RuntimeOptions | None = None) -> GenieRuntime:
            properties = virtual_device.properties()
            made = GenieRuntime(virtual_device, properties, container, options)
            stack.callback(made.clean)
            return made

        yield make


def test_greedy_text_equals_the_host_loop_over_the_same_graphs(
    runtime: GenieRuntime, container: GenAIContainer
) -> None:
    result = runtime.generate(GenerationRequest(4, prompt=PROMPT))
    config = load_config(tiny_llama.folder() / "config.json")
    tokenizer = Tokenizer.from_file(str(container.files["tokenizer.json"]))
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    binaries = [container.files[name] for name in container.genie_config.ctx_bins]
    chains = emulator_chains(
        binaries, OrtQnnToolchain(), soc_model=container.metadata.target.soc_model
    )
    with HostLoop(chains, config) as loop:
        ids = loop.greedy([*config.begin, *prompt], 4, frozenset(config.eos_token_ids))
    assert result.text == tokenizer.decode(ids)
    assert result.metrics["prompt_tokens"] == 1 + len(prompt)  # bos
    assert result.metrics["generated_tokens"] == 4


@pytest.mark.parametrize("file", [1, 2])
def test_a_query_that_arrives_as_another_is_not_asked(runtime: GenieRuntime, file: int) -> None:
    runtime.prepare()
    manager.control("shared").inject(Corrupt(file=file))
    try:
        with pytest.raises(DeploymentCorruptError):
            runtime.generate(GenerationRequest(2, prompt=PROMPT))
    finally:
        manager.control("shared").clear()


def test_a_deployment_to_a_device_that_stalls_ends_in_its_time(
    make_runtime: MakeRuntime, container: GenAIContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.devices.device._KILL_TIMEOUT_S", 0.2)
    runtime = make_runtime(container, RuntimeOptions(timeout_s=0.5))
    manager.control("shared").inject(Stall(seconds=3, when="shell"))
    try:
        with pytest.raises(DeviceTimeoutError):
            runtime.prepare()
    finally:
        manager.control("shared").clear()


def test_a_run_gives_every_figure(runtime: GenieRuntime) -> None:
    result = runtime.generate(GenerationRequest(4, token_ids=tuple(range(100, 130))))
    assert result.metrics.keys() == {
        "init_s", "prompt_tokens", "prefill_tokens_per_s", "ttft_s", "generated_tokens",
        "decode_tokens_per_s", "peak_rss_bytes", "peak_anonymous_bytes", "peak_file_bytes",
    }  # fmt: skip
    assert result.metrics["prompt_tokens"] == 31  # with bos
    assert all(value > 0 for value in result.metrics.values())
    assert 50e6 < result.metrics["peak_rss_bytes"] < 2e9
    own, files = result.metrics["peak_anonymous_bytes"], result.metrics["peak_file_bytes"]
    assert max(own, files) < result.metrics["peak_rss_bytes"]
    bytecode = ["find", runtime.device.work_root, "-name", "*.pyc"]
    assert runtime.device.shell(bytecode).stdout == ""  # the next start could fail to read it


def test_prompts_reach_the_model_byte_for_byte(runtime: GenieRuntime) -> None:
    hostile = "'; rm -rf / #\n$(reboot) \\n \N{SNOWMAN} \N{GRINNING FACE} [BEGIN]: x[END]"
    result = runtime.generate(GenerationRequest(1, prompt=hostile))
    encoder = Tokenizer.from_file(str(tiny_llama.folder() / "tokenizer.json"))
    n_tokens = len(encoder.encode(hostile, add_special_tokens=False).ids)
    assert result.metrics["prompt_tokens"] == 1 + n_tokens


def test_perplexity_agrees_with_the_quantized_graphs_and_with_float(
    runtime: GenieRuntime, container: GenAIContainer, reference_outputs: BuildOutputs
) -> None:
    windows = GenieModel(container).windows(tiny_llama.heldout_text(), 1)
    result = runtime.score(windows)
    config = load_config(tiny_llama.folder() / "config.json")
    scored = [window.scored for window in windows]
    outputs = reference_outputs
    quantized = onnx_perplexity(
        {shape.ar: paths for shape, paths in outputs.qdq_parts.items()}, config, scored
    )
    floating = onnx_perplexity(
        {shape.ar: [path] for shape, path in outputs.float_models.items()}, config, scored
    )
    assert result.tokens == 160
    assert result.perplexity == pytest.approx(quantized, rel=0.01)
    assert result.perplexity == pytest.approx(floating, rel=0.03)


def test_a_second_deployment_pushes_nothing_and_leaves_nothing(
    runtime: GenieRuntime, make_runtime: MakeRuntime, container: GenAIContainer
) -> None:
    runtime.prepare()
    second = make_runtime(container)
    deployment = second.prepare()
    second.clean()
    assert deployment.pushed_bytes == 0
    assert deployment.reused_bytes > container.metadata.size_bytes
    assert runtime.device.shell(["ls", deployment.run_dir], check=False).exit_status != 0


def test_a_prompt_longer_than_the_context_is_refused_on_the_host(
    make_runtime: MakeRuntime, dialog_container: GenAIContainer
) -> None:
    runtime = make_runtime(dialog_container)
    longest, room = 64 - 16, 15  # CL - AR without bos, and what is left then
    prompt = tuple(range(100, 100 + longest + 1))
    for tokens, n_new in ((prompt, 1), (prompt[:longest], room + 1)):
        with pytest.raises(PromptTooLongError, match="64") as caught:
            runtime.generate(GenerationRequest(n_new, token_ids=tokens))
        assert caught.value.exit_code == 2
    fits = runtime.generate(GenerationRequest(room, token_ids=prompt[:longest]))
    assert fits.metrics["generated_tokens"] == room


def test_a_runner_that_hangs_is_killed_and_leaves_no_process(
    make_runtime: MakeRuntime, virtual_device: Device, container: GenAIContainer
) -> None:
    runtime = make_runtime(container, RuntimeOptions(runner_timeout_s=1))
    with pytest.raises(RunnerError, match=r"had not ended after \d+ s and .*--timeout") as caught:
        runtime.generate(GenerationRequest(150, prompt=PROMPT))
    assert caught.value.serial == virtual_device.serial
    assert caught.value.command == "genie_t2t_run.py"
    assert processes_of_runs(virtual_device) == ""


def test_a_limit_grows_with_the_model_on_the_emulator_alone(
    virtual_device: Device, container: GenAIContainer
) -> None:
    properties = virtual_device.properties()
    weights = container.sizes_by_kind["binary"]

    def limit(seconds: float | None, *, emulator: bool) -> float:
        options = RuntimeOptions(runner_timeout_s=seconds)
        place = replace(properties, emulator=emulator)
        return GenieRuntime(virtual_device, place, container, options).limit_s(2, 10)

    assert limit(None, emulator=True) == 2 * (300 + emulated_s(weights, 192 // 32 + 10))
    assert emulated_s(500_000_000, 1) > 60
    assert (limit(7, emulator=True), limit(7, emulator=False)) == (14, 14)


def break_run(runtime: GenieRuntime, device: Device, name: str, content: str) -> None:
    """Replace a file of the run folder: the link goes, the store stays whole."""
    run_dir = runtime.prepare().run_dir
    device.shell(["rm", f"{run_dir}/{name}"])
    device.shell(f"cat > '{run_dir}/{name}'", stdin=content.encode())


@pytest.mark.parametrize(
    ("file", "content", "error", "said"),
    [
        ("", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", RunnerError, "signal 11"),
        ("", "import sys; sys.exit('libGenie.so: cannot open')", RunnerError, "cannot open"),
        ("", "print('garbage')", RuntimeOutputError, r"no \[BEGIN\]"),
        (
            "",
            "print('\\n[BEGIN]: text[END]'); open('profile-1.json', 'w').write('{]')",
            RuntimeOutputError,
            "unreadable Genie profile",
        ),
        ("", "print('\\n[BEGIN]: text[END]')", RuntimeOutputError, r"left no profile-1\.json"),
        ("binary", "no binary", RunnerError, r"\[ERROR\].*no context binary, or damaged"),
    ],
)
def test_a_run_that_crashes_or_prints_garbage_is_a_typed_error(
    make_runtime: MakeRuntime,
    virtual_device: Device,
    container: GenAIContainer,
    file: str,
    content: str,
    error: type[Exception],
    said: str,
) -> None:
    runtime = make_runtime(container)
    name = container.genie_config.ctx_bins[0] if file else "genie_t2t_run.py"
    break_run(runtime, virtual_device, name, content)
    with pytest.raises(error, match=said) as caught:
        runtime.generate(GenerationRequest(4, prompt=PROMPT))
    assert virtual_device.serial in str(caught.value)
    assert "\n" not in str(caught.value)
    assert processes_of_runs(virtual_device) == ""


@pytest.mark.parametrize(
    ("target", "properties", "hint"),
    [
        ("SM8750", {}, "SM8750:emulator"),
        ("SM8650:emulator", {}, "that"),
        ("SM8750", {"soc": "", "hexagon": None}, "SM8750:emulator"),
    ],
)
def test_a_container_for_something_else_is_refused(
    virtual_device: Device,
    container: GenAIContainer,
    target: str,
    properties: dict[str, Any],
    hint: str,
) -> None:
    device = replace(virtual_device.properties(), **properties)
    with pytest.raises(RuntimeChoiceError, match=f"build it for {hint}"):
        GenieRuntime(virtual_device, device, said_to_be_for(target, container))


def said_to_be_for(target: str, container: GenAIContainer) -> GenAIContainer:
    other = container.metadata.target.model_copy(update={"name": target})
    metadata = container.metadata.model_copy(update={"target": other})
    return GenAIContainer(container.path, metadata, container.genie_config)


@pytest.fixture
def phone(
    make_runtime: MakeRuntime,
    virtual_device: Device,
    container: GenAIContainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[GenieRuntime]:
    """A runtime with the SDK's programs, which are ours here: those are not to be had.

    They and the emulator's Genie lie in a folder of the user's.
    """
    folder, wheel = tmp_path / "sdk" / "x86_64", find_libraries()
    folder.mkdir(parents=True)
    for path in (*wheel.folder.glob("lib*.so"), *wheel.support_folder.iterdir()):
        (folder / path.name).symlink_to(path)
    own = Path(device_scripts.__file__).parent
    there = f"{virtual_device.work_root}/emulator-of-a-phone"
    virtual_device.push_many([PushItem(path, f"{there}/{path.name}") for path in own.glob("*.py")])
    for name in ("genie-t2t-run", "genie-app"):
        (folder / name).write_text(f'#!/bin/sh\nexec python3 {there}/genie_t2t_run.py "$@"\n')
    monkeypatch.setenv("QNNFARM_LIBRARIES", str(folder.parent))
    yield make_runtime(container)
    virtual_device.shell(f"rm -r {there}")


def test_a_phone_is_asked_by_the_sdks_own_program(
    phone: GenieRuntime, runtime: GenieRuntime, container: GenAIContainer
) -> None:
    assert phone.runner(Generates) == "genie-t2t-run"
    assert phone.versions()["Genie from"].endswith("/sdk/x86_64")
    request = GenerationRequest(2, prompt=PROMPT)
    assert phone.generate(request).text == runtime.generate(request).text
    assert "genie_t2t_run.py" not in {file.name for file in phone.prepare().files}
    windows = GenieModel(container).windows(tiny_llama.heldout_text(), 1)
    with pytest.raises(RuntimeChoiceError, match="needs Python"):
        phone.score(windows)
