"""`qnnfarm aot`: from a checkpoint to mllm's files, as its document walks."""

import json
from pathlib import Path

from plugins.mllm.parameter_file import read_parameters
from suites.models import tiny_llama
from tests.harness.cli.conftest import Run


def test_the_first_stage_as_mllms_document_has_it(qnnfarm: Run, tmp_path: Path) -> None:
    folder, out = tmp_path / "out", tmp_path / "tiny.mllm"
    options = ("--max_length", "96", "--num_samples", "2", "--output_dir", folder)
    model = ("--model_path", tiny_llama.folder())
    done = qnnfarm("aot", "quantize", *model, *options, "--technique", "none")
    assert done.returncode == 0, done.stderr
    configs = {"config_1M.json", "qnn_aot_cfg_1M.json"}
    files = configs | {"model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == files
    paths = ("--input_path", folder / "model.safetensors", "--output_path", out)
    refused = qnnfarm("aot", "convert", *paths, "--pipeline", "w4a32_kai_pipeline")
    assert (refused.returncode, "quantized already" in refused.stderr) == (2, True)
    done = qnnfarm("aot", "convert", *paths, "--verbose")
    assert "model.norm.weight uint16 [144]" in done.stdout, done.stderr
    assert next(iter(read_parameters(out).tensors)) == "lm_head.scale1"
    answer = json.loads(qnnfarm("aot", "inspect", out, "--json").stdout)
    assert (answer["mllm"]["version"], len(answer["mllm"]["tensors"])) == (2, 407)
    shown = qnnfarm("aot", "inspect", out).stdout
    assert "model.layers.{0..3}.mlp.down_proj.weight" in "".join(shown.split())
    out.write_bytes(out.read_bytes()[:-9])
    damaged = qnnfarm("aot", "convert", "--input-path", out, "--output-path", tmp_path / "x.mllm")
    assert (damaged.returncode, damaged.stderr.count("\n")) == (2, 1)


def test_the_configurations_decide_for_all_commands(qnnfarm: Run, tmp_path: Path) -> None:
    model, folder = ("--model-path", tiny_llama.folder()), ("--output-dir", tmp_path)
    options = ("--max_length", "256", "--target", "SM8750", "--security", "HtpSignedPd")
    done = qnnfarm("aot", "init", tiny_llama.folder(), *options, *folder)
    assert done.returncode == 0, done.stderr
    assert "Unsupported config option 2" in done.stderr
    assert "max_cache_length is 256" in done.stderr
    aot = json.loads((tmp_path / "qnn_aot_cfg_1M.json").read_text())
    assert aot["target_machine"]["htp_arch"] == "V79"
    again = qnnfarm("aot", "init", tiny_llama.folder(), *folder)
    assert (again.returncode, "--overwrite" in again.stderr) == (2, True)
    longer = qnnfarm("aot", "quantize", *model, "--max-length", "128", *folder)
    assert (longer.returncode, "max_cache_length 256" in longer.stderr) == (2, True)
    (tmp_path / "qnn_aot_cfg_1M.json").unlink()
    alone = qnnfarm("aot", "quantize", *model, *folder)
    assert (alone.returncode, "name a pair" in alone.stderr) == (2, True)
