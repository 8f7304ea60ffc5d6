"""Words that several parts put into what people read."""

from harness.results.metrics import METRICS
from harness.words import emulator_notice, pluralize, soc_label


def test_one_is_singular() -> None:
    assert pluralize(0, "part") == "0 parts"
    assert pluralize(1, "unfinished entry") == "1 unfinished entry"
    assert pluralize(1500, "entry") == "1,500 entries"


def test_metrics_of_whole_things_are_too() -> None:
    assert METRICS["prompt_tokens"].show(1) == "1 token"
    assert METRICS["prompt_tokens"].show(2) == "2 tokens"
    assert METRICS["push_files"].show(1) == "1 file"
    assert METRICS["decode_tokens_per_s"].show(1) == "1.00 tokens/s"
    assert METRICS["ttft_s"].show(0.001) == "1.0 ms"


def test_an_unknown_soc_leaves_no_gap() -> None:
    assert soc_label("SM8750", emulator=True) == "SM8750 emulator"
    assert soc_label("", emulator=True) == "emulator"
    assert soc_label("", emulator=False) == ""


def test_a_virtual_device_runs_programs_of_others_on_the_cpu_of_its_host() -> None:
    label = soc_label("SM8650", emulator=True, runtime="llama.cpp")
    assert label == "host CPU of a virtual SM8650"
    assert soc_label("SM8650", emulator=False, runtime="llama.cpp") == "SM8650"
    assert "HTP" not in emulator_notice(["llama.cpp"])
    assert "CPU" not in emulator_notice(["genie", "graph"])
    assert "HTP emulator or on the host's CPU" in emulator_notice(["genie", "llama.cpp"])
