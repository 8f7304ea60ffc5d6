"""The options of how a dialog runs, and their refusals before a device is asked for."""

from pathlib import Path

import pytest

from harness.cli.dialog_options import DialogOptions, parse_tokens
from harness.errors import WrongUseError
from harness.runtimes.dialog_settings import DialogSettings
from harness.workloads.bench import Bench
from harness.workloads.generate import Generate
from harness.workloads.registry import from_json, to_json


def test_tokens_are_ids_or_a_file_of_ids(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("42 79\n260\n")
    assert parse_tokens("42 79,260") == parse_tokens(str(tmp_path / "ids")) == (42, 79, 260)
    (tmp_path / "words").write_text("42 x")
    for wrong in ("", "no/such", str(tmp_path / "words"), "9999999999", str(tmp_path)):
        with pytest.raises(WrongUseError, match="--tokens"):
            parse_tokens(wrong)


def test_options_left_out_set_no_field() -> None:
    assert DialogOptions().fields() == {}
    fields = DialogOptions(0.5, 40, 0.9, 7, ["."], "red=0.5").fields()
    assert fields == {
        "temp": 0.5, "top_k": 40, "top_p": 0.9, "seed": 7, "stop": (".",), "lora": {"red": 0.5},
    }  # fmt: skip
    assert DialogOptions(lora="red").fields() == {"lora": {"red": 1.0}}
    with pytest.raises(WrongUseError, match="no NAME=STRENGTH"):
        DialogOptions(lora="red=much").fields()


@pytest.mark.parametrize(
    ("fields", "greedy", "record"),
    [
        ({}, True, {"greedy": True}),
        ({"top_k": 1, "temp": 2.0}, True, {"greedy": True}),
        ({"temp": 0.0}, True, {"greedy": True}),
        ({"temp": 0.5}, False, {"seed": 42, "temp": 0.5, "top-k": 0, "top-p": 1.0}),
        ({"seed": 3}, False, {"seed": 3, "temp": 1.0, "top-k": 0, "top-p": 1.0}),
        (
            {"stop": (".",), "lora": {"red": 0.5}},
            True,
            {"greedy": True, "stop": '["."]', "lora": "red=0.5"},
        ),
    ],
)
def test_settings_are_greedy_unless_one_samples(
    fields: dict[str, object], greedy: bool, record: dict[str, object]
) -> None:
    settings = DialogSettings.model_validate(fields)
    assert settings.is_greedy is greedy
    assert settings.record() == record
    assert (not settings.sampling) is greedy
    assert DialogSettings(seed=-1).is_reproducible is False


def test_workloads_with_settings_go_to_json_and_back() -> None:
    for workload in (
        Generate.of(prompt=("a", "b"), temp=0.5, stop=(".",), rewind=True),
        Generate.of(tokens=(1, 2), lora={"red": 1.0}),
        Bench.of(seed=7, top_k=40),
    ):
        assert from_json(to_json(workload)) == workload
