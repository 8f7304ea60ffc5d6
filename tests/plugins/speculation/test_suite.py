"""The suite of speculating containers, as users run it, on containers built as users build them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from buildlib.builder.lora_config import LoraBuilderInputConfig
from buildlib.builder.speculative_config import (
    EagletBuilderConfig,
    SpeculativeConfig,
    SsdBuilderConfig,
)
from buildlib.container.container import GenAIContainer
from harness.devices.device import Device
from harness.runtimes.registry import open_model
from harness.workloads.dialog import Dialog
from harness.workloads.generate import Generate
from harness.workloads.session import Session
from suites.models import tiny_llama
from suites.models.tiny_llama import lora
from tests.builders import builder_for
from tests.suites.user_pytest import run_pytest

MODEL = tiny_llama.folder()
SSD = SsdBuilderConfig(ssd_tensor_file=MODEL / "ssd" / "ssd_tensor.safetensors")
EAGLET = EagletBuilderConfig(
    draft_model_path=MODEL / "eaglet" / "draft_model.onnx",
    draft_len=3,
    n_branches=2,
    max_tokens_target_can_evaluate=16,
)


def build(
    how: SpeculativeConfig | None, cache: Path, model: Path, adapters: Path | None = None
) -> GenAIContainer:
    builder = builder_for(model, cache, splits=2 if adapters is None else 3)
    if how is not None:
        builder.speculative_config = how
    if adapters is not None:
        builder.lora_config = LoraBuilderInputConfig(lora_config_path=adapters)
    return builder.build()


def run_suite(
    how: SpeculativeConfig,
    plain: Path,
    cache: Path,
    serial: str,
    folder: Path,
    prompts: int = 3,
    model: Path = MODEL,
) -> str:
    """Build a container that speculates, and run its suite; return what pytest printed."""
    container = build(how, cache, model)
    assert container.genie_config.dialog.type != "basic"
    compared = container.metadata.speculation
    assert compared is not None
    assert (compared.differing, compared.prompts, compared.tokens) == (0, 3, 24)
    done = run_pytest(
        folder, "--pyargs", "plugins.speculation.test_suite", f"--device={serial}",
        f"--container={container.path}", f"--suite-param=plain={plain}",
        f"--suite-param=speculation_prompts={prompts}", f"--junitxml={folder}/junit.xml",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout, done.stdout
    return (folder / "junit.xml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(SSD, id="ssd-q1", marks=pytest.mark.genie_configuration("dialog ssd-q1")),
        pytest.param(EAGLET, id="eaglet", marks=pytest.mark.genie_configuration("dialog eaglet")),
    ],
)
def test_greedy_text_is_plain_decoding_s(
    how: SpeculativeConfig,
    tiny_bundle: Path,
    build_cache: Path,
    virtual_device: Device,
    tmp_path: Path,
) -> None:
    report = run_suite(how, tiny_bundle, build_cache, virtual_device.serial, tmp_path)
    (rate,) = re.findall(r'token_acceptance_rate[^"]*" value="([\d.]+)"', report)
    assert float(rate) > 1.0


@pytest.mark.slow
def test_a_tree_keeps_to_a_sliding_window(
    build_cache: Path, virtual_device: Device, tmp_path: Path
) -> None:
    """A slot is in the window of a token by how many it sees, so branches do not count."""
    model = tmp_path / "windowed"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.py", "ssd", "eaglet", "lora"))
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config | {"sliding_window": 48}))
    plain = build(None, build_cache, model)
    run_suite(SSD, plain.path, build_cache, virtual_device.serial, tmp_path, 2, model)


@pytest.mark.slow
@pytest.mark.needs("plugins.lora")
@pytest.mark.parametrize("how", [SSD, EAGLET], ids=["ssd-q1", "eaglet"])
def test_turns_and_adapters_are_those_of_plain_decoding(
    how: SpeculativeConfig, build_cache: Path, virtual_device: Device, tmp_path: Path
) -> None:
    container = build(how, build_cache, MODEL, lora.folder() / "lora_config.yaml")
    plain = tmp_path / "plain.json"
    plain.write_text(container.genie_config.as_basic().to_json())
    turns: tuple[str, ...] = (
        "In the beginning God",
        "And the LORD said unto",
        "Now these are the names of",
    )
    rewound = Generate.of(prompt=("In the beginning God", "In the beginning was"), rewind=True)
    workloads: list[Dialog | Generate] = [rewound]
    if how is EAGLET:
        workloads, turns = [], turns[:1]
    dialogs = (turns, *({"turns": turns, "lora": {name: 1.0}} for name in ("law", "psalms")))
    workloads.append(Dialog.of(dialogs=dialogs, max_tokens=12))
    with Session(virtual_device, open_model(container.path)) as session:
        for workload in workloads:
            expected = workload.model_copy(update={"genie_config": str(plain)}).run(session).output
            assert workload.run(session).output.answers == expected.answers
            assert len({answer for turns in expected.answers for answer in turns}) > 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", [SSD, EAGLET], ids=["ssd-q1", "eaglet"])
def test_on_twenty_prompts(
    how: SpeculativeConfig,
    tiny_bundle: Path,
    build_cache: Path,
    virtual_device: Device,
    tmp_path: Path,
) -> None:
    run_suite(how, tiny_bundle, build_cache, virtual_device.serial, tmp_path, 20)
