"""`qnnfarm conformance` by a stand-in SDK on a virtual device, and checks that are refuted."""

import json
import shutil
from pathlib import Path

import pytest

from buildlib.builder.build import BuildOutputs
from buildlib.container.container import GenAIContainer
from harness.devices.device import Device
from harness.runtimes.base import GenerationResult
from plugins.diagnosis.conformance import (
    _compare,
    _compare_scores,
    _Containers,
    _graphs_of,
    _Refuted,
)
from tests.harness.cli.conftest import Run
from tests.plugins.qairt.qairt_sdk import make_sdk


@pytest.fixture(scope="module")
def model(one_layer: Path, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(one_layer, tmp_path_factory.mktemp("conformance") / "model")
    return Path(shutil.copytree(small_model / "text", folder / "text")).parent


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the reports, with the stages that do not depend on an SDK."""
    return tmp_path_factory.mktemp("out")


FEW = ("--prompts", "1", "--max-tokens", "3", "--ar", "8", "--cl", "48", "--json")


@pytest.mark.variant
def test_a_stand_in_of_the_sdk_and_a_virtual_device_conform(
    qnnfarm: Run, virtual_device: Device, model: Path, out: Path, tmp_path: Path
) -> None:
    sdk = make_sdk(tmp_path / "2.39.0.250926")
    by = ("--toolchain", "qairt", "--qairt-sdk", sdk, "--device", "virtual:shared")
    done = qnnfarm("conformance", model, *by, *FEW, "--out", out)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((out / "conformance.json").read_text())
    assert report == json.loads(done.stdout)
    assert report["toolchain"] == {"toolchain": "qairt", "qairt_sdk": "2.39.0.250926"}
    marks = {check["subject"]: check["mark"] for check in report["checks"]}
    there = {"build", "graphs", "weight sharing", "second reader", "SDK on emulator"}
    here = {"emulator", "bundle", "Genie", "profiles", "tokens", "graph runtime", "perplexity"}
    here |= {"device"}
    assert {subject for subject, mark in marks.items() if mark == "proven there"} == there
    assert {subject for subject, mark in marks.items() if mark == "proven here"} == here
    assert set(marks.values()) == {"proven here", "proven there", "open"}
    assert "| native KV | open |" in (out / "conformance.md").read_text()
    assert (out / "profiles" / "1.json").is_file()


def test_a_build_that_fails_is_reported(
    qnnfarm: Run, model: Path, out: Path, tmp_path: Path
) -> None:
    sdk = make_sdk(tmp_path / "sdk", "2.40.0.251030")
    (sdk / "bin" / "x86_64-linux-clang" / "qairt-converter").write_text("#!/bin/sh\nexit 7\n")
    by = ("--toolchain", "qairt", "--qairt-sdk", sdk, "--out", out)
    done = qnnfarm("conformance", model, *by, *FEW)
    assert done.returncode == 1, done.stderr
    (build, *others) = json.loads((out / "conformance.json").read_text())["checks"]
    assert (build["subject"], build["mark"]) == ("build", "failed")
    assert "status 7" in build["detail"]
    assert {check["mark"] for check in others} == {"open"}


def result(text: str, tokens: tuple[int, ...] | None) -> GenerationResult:
    return GenerationResult(text, {}, token_ids=tokens)


def test_other_tokens_are_refuted_and_texts_where_there_are_none() -> None:
    emulator = [result("a b", (1, 2))]
    assert "1 of 1" in _compare([result("", (1, 2))], emulator)[0]
    assert "1 of 1" in _compare([result("a b", None)], emulator)[0]
    with pytest.raises(_Refuted, match=r"\[1, 3\], and the emulator \[1, 2\]"):
        _compare([result("a b", (1, 3))], emulator)
    with pytest.raises(_Refuted, match="'a c', and the emulator 'a b'"):
        _compare([result("a c", None)], emulator)


def test_a_perplexity_is_bounded_on_both_sides() -> None:
    assert _compare_scores(10.2, 10.0)
    for other in (9.6, 10.4):
        with pytest.raises(_Refuted, match="more than 3% apart"):
            _compare_scores(other, 10.0)


def test_a_container_without_shared_weights_and_other_graphs_are_refuted(
    reference_outputs: BuildOutputs, small_bundle: Path
) -> None:
    one = GenAIContainer.load(reference_outputs.container)
    with pytest.raises(_Refuted, match="saves nothing"):
        _Containers(one, one, one).compare_sizes()
    with pytest.raises(_Refuted, match="only one of both toolchains makes"):
        _Containers(one, one, GenAIContainer.load(small_bundle)).compare_graphs()


def test_a_description_of_another_form_is_refuted() -> None:
    with pytest.raises(_Refuted, match="another form"):
        _graphs_of({"info": {"graphs": [{"graphName": "a"}]}})
