"""`qnnfarm inspect` on what the real build made."""

import json
import shutil
from pathlib import Path

from buildlib.builder.build import BuildOutputs
from buildlib.toolchains.base import TensorInfo
from harness.cli.tensors import alike, common_name
from suites.models import tiny_llama
from tests.builders import builder_for
from tests.buildlib.checkpoint.tokenizer_families import write
from tests.harness.cli.conftest import Run


def test_a_container(qnnfarm: Run, reference_outputs: BuildOutputs) -> None:
    shown = qnnfarm("inspect", reference_outputs.container)
    assert shown.returncode == 0, shown.stderr
    for said in ("past_key_{0..1}_in", "soc_model 69", "together", "ar32_cl192_2_of_2"):
        assert said in shown.stdout, shown.stdout
    facts = dict(line.split(None, 1) for line in shown.stdout.splitlines() if " " in line.strip())
    assert facts["precision"] == "W8A16"
    assert "int16" not in shown.stdout.replace("uint16", "")  # types as they are stored
    every = qnnfarm("inspect", reference_outputs.container, "--tensors").stdout
    assert "past_key_1_in" in every
    answer = json.loads(qnnfarm("inspect", reference_outputs.container, "--json").stdout)
    assert set(answer["sizes_by_kind"]) == {"binary", "tokenizer", "configuration"}
    assert len(answer["binaries"]) == 2


def test_a_build_and_what_is_inspected_agree(
    qnnfarm: Run, reference_outputs: BuildOutputs, tmp_path: Path
) -> None:
    shape = ("--ar", "1,32", "--cl", "192", "--splits", "2")
    target = ("--target", "SM8750:emulator", "--out", tmp_path / "out")
    built = qnnfarm("build", tiny_llama.folder(), *target, *shape)
    assert built.returncode == 0, built.stderr
    shown = qnnfarm("inspect", reference_outputs.container).stdout
    (together,) = (line for line in shown.splitlines() if line.startswith("together"))
    size = " ".join(together.split()[1:])
    assert f"SM8750:emulator, W8A16, 2 parts, {size}, " in " ".join(built.stdout.split())


def test_an_option_that_changed_nothing(
    qnnfarm: Run, small_bundle: Path, small_model: Path, build_cache: Path
) -> None:
    builder = builder_for(small_model, build_cache)
    relaxed = builder.set_options({"graphs.fp16_relaxed_precision": True}).build()
    words = "no effect here, because the compiler computes floats with 16 bits"
    assert words in " ".join(qnnfarm("inspect", relaxed.path).stdout.split())
    assert "no effect here" not in qnnfarm("inspect", small_bundle).stdout


def test_a_checkpoint_and_the_keys_that_its_code_does_not_read(
    qnnfarm: Run, tmp_path: Path
) -> None:
    config = json.loads((tiny_llama.folder() / "config.json").read_text())
    leftovers = {"sliding_window": 8, "attn_logit_softcapping": 5.0, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config | leftovers))
    shown = qnnfarm("inspect", tmp_path).stdout.splitlines()
    unread = "attn_logit_softcapping, sliding_window"
    assert "not read by LlamaForCausalLM  " + unread in shown
    assert not any(line.startswith("sliding_window") for line in shown)
    answer = json.loads(qnnfarm("inspect", tmp_path, "--json").stdout)
    assert answer["not_read"] == unread.split(", ")
    assert answer["config"]["rope_theta"] == 10000.0
    built = qnnfarm("build", tmp_path, "--target", "SM8750", "--out", tmp_path / "out", "-v")
    assert f"not read by LlamaForCausalLM: {unread}" in built.stderr


def test_what_the_tokenizer_and_the_generation_settings_say(qnnfarm: Run, tmp_path: Path) -> None:
    shutil.copy(tiny_llama.folder() / "config.json", tmp_path)
    write("sentence-transformers", tmp_path)
    settings = {"do_sample": True, "top_k": 20, "eos_token_id": [1, 5], "max_length": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    shown = " ".join(qnnfarm("inspect", tmp_path).stdout.split())
    for said in (
        "tokenizer puts before a text [CLS] tokenizer after it [SEP]",
        "cuts texts to 128 tokens and fills them to 128: switched off",
        "generation eos_token_id 1, 5 generation do_sample True generation top_k 20",
    ):
        assert said in shown, shown
    answer = json.loads(qnnfarm("inspect", tmp_path, "--json").stdout)
    assert answer["tokenizer"]["puts before a text"] == "[CLS]"
    assert answer["generation"] == {"do_sample": True, "top_k": 20, "eos_token_id": [1, 5]}


def test_single_files_and_entries(
    qnnfarm: Run, reference_outputs: BuildOutputs, tmp_path: Path
) -> None:
    binary = reference_outputs.binaries[0]
    assert "VTCM 8 MiB" in qnnfarm("inspect", binary).stdout
    entry = json.loads(qnnfarm("inspect", binary.parent, "--json").stdout)
    assert entry["entry"]["operation"] == "compile"
    assert list(entry["graphs"]) == [binary.name]
    dlc = next(next(iter(reference_outputs.qdq_parts.values()))[0].parent.glob("*.dlc"))
    alone = shutil.copy(dlc, tmp_path / "renamed")
    shown = qnnfarm("inspect", alone).stdout
    assert "operators: " in shown
    assert "RmsNorm" in shown
    converted = qnnfarm("inspect", dlc.parent)
    assert converted.stdout.splitlines()[0].split() == ["operation", "convert"], converted.stderr


def test_tensors_that_are_alike_share_a_line() -> None:
    def tensor(name: str, *shape: int) -> TensorInfo:
        return TensorInfo(name, shape, "uint8", None)

    tensors = [tensor(f"past_key_{n}_in", 2, 3) for n in (0, 1, 2, 12)]
    tensors += [tensor("past_key_3_in", 2, 4), tensor("logits", 1)]
    names = [common_name([t.name for t in group]) for group in alike(tensors)]
    assert names == ["past_key_{0,1,2,12}_in", "past_key_3_in", "logits"]
    assert common_name(["a_3_in", "a_2_in"]) == "a_{2..3}_in"
